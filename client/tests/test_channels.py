"""What only channels do: they grow, are closed by the server, and meet its limits."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from expertd_client import (
    ExpertClient,
    InvalidRequestError,
    ServerUnreachableError,
    TransportUnavailableError,
)
from tests.callers import Connect, one_client
from tests.expertd import HIDDEN, MODEL, RunningServer, channels_in, running_server
from tests.fakes import Peer, answer, echo, fake_server
from tests.waiting import wait_for

X = np.random.default_rng(13).standard_normal((5, HIDDEN), dtype=np.float32)
slow = pytest.mark.slow  # a server process


@slow
def test_one_channel_serves_all_sizes_and_is_closed_with_the_client(
    connect: Connect, sharing_server: RunningServer
) -> None:
    client = connect(sharing_server.url, transport="auto")
    for size in (1, 5, 600, 3, 700):
        client.infer(MODEL, np.ones((size, HIDDEN), np.float32))
        assert client.client.transport == "channel"
    wait_for(lambda: len(sharing_server.channels()) == 1, "smaller channels are closed")
    assert sharing_server.channels()[0]["requests"] == 3  # of 600, 3 and 700 tokens
    client.close()
    wait_for(lambda: not sharing_server.channels(), "it is closed")


@slow
def test_a_channel_that_was_closed_between_two_calls_is_replaced(
    connect: Connect, sharing_server: RunningServer
) -> None:
    client = connect(sharing_server.url, transport="channel")
    expected = client.infer(MODEL, X)
    for _ in range(3):
        sharing_server.close_channels()
        np.testing.assert_array_equal(client.infer(MODEL, X), expected)


@slow
def test_a_channel_that_is_closed_during_a_call(tmp_path: Path) -> None:
    """The call fails, and the next one opens another channel."""
    large = np.ones((2048, HIDDEN), np.float32)
    failures: list[Exception] = []

    def call(client: ExpertClient) -> None:
        while not failures:
            try:
                client.infer(MODEL, large)
            except ServerUnreachableError as error:
                failures.append(error)

    with (
        running_server(tmp_path, channels_in(tmp_path)) as server,
        ExpertClient(server.url, transport="channel") as client,
    ):
        expected = client.infer(MODEL, X)
        thread = threading.Thread(target=call, args=(client,))
        thread.start()
        while thread.is_alive():
            server.close_channels()
            thread.join(0.05)
        assert str(failures[0]).startswith("channel: expected an answer, got")
        np.testing.assert_array_equal(client.infer(MODEL, X), expected)


@slow
@one_client
def test_limits_that_are_no_powers_of_two(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ["limits.max_request_tokens=100", "limits.max_batch_tokens=128"]
    with running_server(tmp_path, *limits, channels_in(tmp_path)) as server:
        client = connect(server.url, transport="channel")
        for size in (100, 99, 3):
            assert client.infer(MODEL, np.ones((size, HIDDEN), np.float32)).shape == (size, HIDDEN)
        for name in ("channel", "auto"):
            asking = connect(server.url, transport=name)
            for size in (101, 201):  # in parts
                assert asking.infer(MODEL, np.ones((size, HIDDEN), np.float32)).shape == (size, HIDDEN)
            assert asking.infer(MODEL, X).shape == X.shape
        client.close()
    assert not caplog.records, "no call took HTTP"


@slow
@one_client
def test_calls_beyond_the_servers_memory_go_over_http(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tmp_path, channels_in(tmp_path), "channels.max_bytes=1000000") as server:
        client = connect(server.url, transport="auto")
        large = np.ones((600, HIDDEN), np.float32)
        for _ in range(3):
            assert client.infer(MODEL, large).shape == large.shape
            assert client.infer(MODEL, X).shape == X.shape
        assert (client.client.transport, len(server.channels())) == ("channel", 1)
        (warning,) = caplog.messages
        assert warning.startswith("transport channel: channels.max_bytes: expected ")
        assert warning.endswith("; taking http for this call")
        with pytest.raises(InvalidRequestError, match=r"^channels\.max_bytes: expected"):
            connect(server.url, transport="channel").infer(MODEL, large)
        client.close()


@slow
@one_client
def test_a_client_beyond_the_servers_number_of_channels(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tmp_path, channels_in(tmp_path), "channels.max_channels=1") as server:
        first, second = (connect(server.url, transport="auto") for _ in range(2))
        expected = first.infer(MODEL, X)
        np.testing.assert_array_equal(second.infer(MODEL, X), expected)
        (warning,) = caplog.messages
        assert warning.startswith("transport channel: channels.max_channels: expected fewer than 1 open")
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("opened", "text"),
    [
        ({}, "answer: expected a channel, got"),
        ({"version": 1}, "version of channels: expected 3, got 1"),
        ({"version": 3}, "socket of channels /nowhere: expected a connection, got"),
    ],
)
def test_channels_that_cannot_be_used_from_here(
    connect: Connect, caplog: pytest.LogCaptureFixture, opened: dict[str, object], text: str
) -> None:
    """Such as those of a server in a container, or of a newer one: another transport, with a warning."""
    geometry = {"num_slots": 8, "control_bytes": 4352, "data_bytes": 4096, "hidden_size": 3, "top_k": 1}
    body = {**opened, "socket": "/nowhere", "token": "00" * 32, "geometry": geometry} if opened else {}

    def handle(peer: Peer) -> None:
        while True:
            request = peer.request()
            path = request.line.split()[1]
            if path == "/v1/channels":
                peer.send(answer(201, json.dumps(body).encode()))
            elif path == "/v2":
                peer.send(answer(200, b'{"extensions": []}'))
            else:
                peer.send(echo(request))

    values = np.ones((2, 3), np.float32)
    with fake_server(handle) as server:
        client = connect(server.url, transport="auto")
        for _ in range(2):
            np.testing.assert_array_equal(client.infer("m", values), values)
        assert client.client.transport == "http"
        forced = connect(server.url, transport="channel")
        with pytest.raises(TransportUnavailableError, match=f"^{text}"):
            forced.infer("m", values)
        client.close()
        forced.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"transport channel: {text}")
    assert sum(request.line.startswith("POST /v1/channels") for request in server.requests) == 2
