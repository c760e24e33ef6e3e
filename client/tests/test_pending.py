"""`submit` and `wait` apart, over every transport."""

from threading import Event
from typing import Any

import numpy as np
import pytest

from expertd_client import DeadlineError, ExpertClient, InvalidRequestError, ServerUnreachableError
from tests.callers import AnyCaller, Connect
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer
from tests.fakes import Peer, echo, echoing, fake_server
from tests.rounding import assert_rounded
from tests.waiting import wait_for

RNG = np.random.default_rng(53)
X = RNG.standard_normal((9, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((9, NUM_EXPERTS)), axis=1)[:, :TOP_K]
WEIGHTS = RNG.random((9, TOP_K), dtype=np.float32)
SMALL = np.ones((2, 3), np.float32)


@pytest.fixture(params=["channel", "http"])
def client(request: pytest.FixtureRequest, connect: Connect, sharing_server: RunningServer) -> AnyCaller:
    return connect(sharing_server.url, transport=request.param)


@pytest.mark.slow
def test_calls_in_flight_and_their_outputs(client: AnyCaller) -> None:
    expected = [client.infer(MODEL, X * scale, IDS, WEIGHTS) for scale in range(1, 5)]
    out = np.empty_like(X)
    calls = [client.submit(MODEL, X * scale, IDS, WEIGHTS) for scale in range(1, 4)]
    calls.append(client.submit(MODEL, X * 4, IDS, WEIGHTS, out=out))
    wait_for(lambda: all(call.is_done() for call in calls), "all calls are answered")
    outputs = [call.wait() for call in calls]
    assert outputs[3] is out
    for output, right in zip(outputs, expected, strict=True):
        assert_rounded(output, right)


@pytest.mark.slow
def test_a_call_is_sent_before_it_is_waited_for(client: AnyCaller, sharing_server: RunningServer) -> None:
    """Also the first one, for which a channel is opened."""

    def answered() -> int:
        models = sharing_server.ask(f"/v2/models/{MODEL}/stats")["model_stats"]
        return int(models[0]["inference_count"])

    before = answered()
    call = client.submit(MODEL, X)
    wait_for(lambda: call.is_done() and answered() > before, "the server has answered it")
    assert call.wait().shape == X.shape


@pytest.mark.slow
def test_errors_come_with_the_wait(client: AnyCaller, sharing_server: RunningServer) -> None:
    wrong = client.submit(MODEL, X, IDS + NUM_EXPERTS, WEIGHTS)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="topk_ids: expected"):
            wrong.wait()
    assert wrong.is_done()
    with pytest.raises(InvalidRequestError, match="topk_weights"):
        client.submit(MODEL, X, IDS)
    client.infer(MODEL, X)
    with sharing_server.stopped():
        late = client.submit(MODEL, X, timeout=0.05)
        assert not late.is_done()
        with pytest.raises(DeadlineError):
            late.wait()
    assert client.infer(MODEL, X).shape == X.shape


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["channel", "http"])
def test_one_that_is_dropped_gives_its_place_up(sharing_server: RunningServer, transport: Any) -> None:
    with ExpertClient(sharing_server.url, transport=transport, max_connections=1, timeout=60) as client:
        for _ in range(3):
            client.submit(MODEL, X)
            assert client.infer(MODEL, X).shape == X.shape


def test_more_than_there_are_connections(connect: Connect) -> None:
    with fake_server(echoing) as server:
        client = connect(server.url, max_connections=1)
        calls = [client.submit("m", SMALL * scale) for scale in range(4)]
        for scale, call in enumerate(calls):
            np.testing.assert_array_equal(call.wait(), SMALL * scale)
        client.close()
    assert server.num_connections == 1


def test_an_answer_that_came_in_time_may_be_read_later() -> None:
    submitted = Event()

    def handle(peer: Peer) -> None:
        request = peer.request()
        submitted.wait()
        peer.send(echo(request))

    with fake_server(handle) as server, ExpertClient(server.url, transport="http") as client:
        call = client.submit("m", SMALL, timeout=2.0)
        submitted.set()
        wait_for(lambda: call._call._wait is not None and call._call._wait.is_over(), "the answer is there")
        deadline: Any = call._call._wait
        wait_for(lambda: deadline.connection.deadline.remaining() <= 0, "its time is over")
        np.testing.assert_array_equal(call.wait(), SMALL)


def test_a_server_that_is_lost_in_between(connect: Connect) -> None:
    def handle(peer: Peer) -> None:
        request = peer.request()
        if len(server.requests) > 1:
            peer.send(echo(request))
        peer.close()

    with fake_server(handle) as server:
        for seconds in (0.0, 20.0):
            server.requests.clear()
            client = connect(server.url, retry_seconds=seconds)
            call = client.submit("m", SMALL)
            if seconds:
                np.testing.assert_array_equal(call.wait(), SMALL)
            else:
                with pytest.raises(ServerUnreachableError):
                    call.wait()
            client.close()
