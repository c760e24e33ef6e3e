"""Which transport a client takes."""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from expertd_client import ExpertClient, ExpertError, InvalidRequestError, TransportUnavailableError
from tests.callers import Connect
from tests.fakes import Peer, answer, echo, fake_server, refusal


@pytest.mark.parametrize(
    ("wanted", "url", "name"),
    [
        ("auto", "http://localhost:1", "channel"),
        ("auto", "http://experts:1", "http"),
        ("nixl", "http://experts:1", "nixl"),
        ("channel", "http://experts:1", "channel"),
        ("http", "http://localhost:1", "http"),
    ],
)
def test_auto_takes_the_faster_for_a_server_on_this_machine(
    connect: Connect, caplog: pytest.LogCaptureFixture, wanted: str, url: str, name: str
) -> None:
    with caplog.at_level(logging.INFO, "expertd_client"):
        assert connect(url, transport=wanted).client.transport == name
    assert caplog.messages == [f"transport {name}: server {url}"]
    with pytest.raises(InvalidRequestError, match=r"^transport: expected auto, channel, nixl, http, got"):
        connect(url, transport="carrier pigeon")


class WithoutChannels:
    """A server that refuses channels with a status, and echoes."""

    def __init__(self, status: int) -> None:
        self._status = status

    def __call__(self, peer: Peer) -> None:
        while True:
            request = peer.request()
            path = request.line.split()[1]
            if path == "/v1/channels":
                peer.send(refusal(self._status, "channels: expected the setting channels.socket, got null"))
            elif path == "/v2/models/m":
                peer.send(answer(200, b"{}"))
            else:
                peer.send(echo(request))


@pytest.mark.parametrize("status", [403, 404])
def test_auto_says_once_why_and_is_quick_if_the_server_has_only_http(
    connect: Connect, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    values = np.ones((2, 3), np.float32)
    with (
        fake_server(WithoutChannels(status)) as server,
        caplog.at_level(logging.INFO, "expertd_client"),
    ):
        client = connect(server.url, transport="auto")
        before = client.client.transport  # none of them has been tried
        for _ in range(3):
            np.testing.assert_array_equal(client.infer("m", values), values)
        assert (before, client.client.transport) == ("channel", "http")
        client.close()
    others = [request.line.split()[1] for request in server.requests if "infer" not in request.line]
    assert others == ["/v1/channels", *(["/v2/models/m"] if status == 404 else [])]
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.message.startswith("transport channel: channels: expected ")
    assert warning.message.endswith("; taking http")
    assert caplog.messages[2:] == [f"transport http: server {server.url}"]


def test_threads_fall_back_together() -> None:
    values = np.ones((2, 3), np.float32)
    with (
        fake_server(WithoutChannels(403)) as server,
        ExpertClient(server.url) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        for given in pool.map(lambda _: client.infer("m", values), range(40)):
            np.testing.assert_array_equal(given, values)


def test_one_that_is_asked_for_is_used_or_nothing(connect: Connect) -> None:
    with fake_server(WithoutChannels(403)) as server:
        client = connect(server.url, transport="channel")
        for _ in range(2):
            with pytest.raises(TransportUnavailableError, match=r"^channels: expected the") as caught:
                client.infer("m", np.ones((2, 3), np.float32))
            assert caught.type is TransportUnavailableError  # none that this package does not export
        assert client.client.transport == "channel"
        client.close()
    assert not any("infer" in request.line for request in server.requests)


@pytest.mark.parametrize("status", [503, 500])
def test_a_refusal_for_now_concerns_one_call(
    connect: Connect, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    values = np.ones((2, 3), np.float32)
    with fake_server(WithoutChannels(status)) as server:
        client = connect(server.url, transport="auto")
        for _ in range(3):
            np.testing.assert_array_equal(client.infer("m", values), values)
        assert client.client.transport == "channel"  # to be tried again after a while
        client.close()
    lines = [request.line.split()[1] for request in server.requests]
    assert lines == ["/v1/channels"] * 3 + ["/v2/models/m/infer"] * 3
    text = "transport channel: channels: expected the setting channels.socket, got null; taking http for"
    assert caplog.messages == [f"{text} this call"]


def test_a_closed_client_takes_no_other_transport(connect: Connect) -> None:
    with fake_server(WithoutChannels(403)) as server:
        client = connect(server.url, transport="auto")
        client.close()
        with pytest.raises(ExpertError, match=r"^client: expected an open one, got a closed one$"):
            client.infer("m", np.ones((2, 3), np.float32))
    assert server.requests == []
