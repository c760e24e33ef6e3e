"""Answers that are errors, and servers that are busy."""

import time
from email.utils import formatdate

import numpy as np
import pytest

from expertd_client import (
    DeadlineError,
    ExpertError,
    InvalidAnswerError,
    InvalidRequestError,
    ServerBusyError,
    UnknownModelError,
)
from expertd_client.address import parse_address
from expertd_client.deadline import Deadline
from expertd_client.http.attempts import Attempts
from expertd_client.http.connection import Connection
from expertd_client.http.head import AnswerHead, parse_head
from expertd_client.http.waits import Connect as ConnectWait
from expertd_client.steps import Sleep, Steps
from tests.callers import Connect
from tests.fakes import Peer, answer, answering, echoing, fake_server, refusal

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (413, InvalidRequestError),
        (422, InvalidRequestError),
        (404, UnknownModelError),
        (408, ExpertError),
        (429, ServerBusyError),
        (500, ExpertError),
        (502, ExpertError),
        (503, ServerBusyError),
        (301, InvalidAnswerError),
    ],
)
def test_each_status_has_its_exception(connect: Connect, status: int, kind: type[ExpertError]) -> None:
    with fake_server(answering(refusal(status, "a: expected b, got c"))) as server:
        client = connect(server.url)
        with pytest.raises(ExpertError) as caught:
            client.infer("m", X[:1])  # several tokens would be sent in parts after 413
        assert (type(caught.value), caught.value.status) == (kind, status)
        if status != 301:
            assert str(caught.value) == "a: expected b, got c"
        client.infer("m", X)
        client.close()
    assert len(server.requests) == 2
    assert server.num_connections == 1, "an error that was read to its end leaves the connection usable"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"", "answer: expected an error text, got an empty body"),
        (b'{"detail": "no"}', '{"detail": "no"}'),
        (b"[" * 100_000, "[" * 500),
        (b"\xff", "\ufffd"),
    ],
)
def test_errors_that_are_not_the_protocols(connect: Connect, body: bytes, text: str) -> None:
    with fake_server(answering(answer(502, body))) as server:
        client = connect(server.url)
        with pytest.raises(ExpertError) as caught:
            client.infer("m", X)
        client.close()
    assert str(caught.value) == text


def test_it_is_asked_again_max_retries_times(connect: Connect) -> None:
    with fake_server(answering(*[refusal(503, "full", "Retry-After: 0")] * 9)) as server:
        client = connect(server.url, max_retries=2)
        with pytest.raises(ServerBusyError, match=r"^full$") as caught:
            client.infer("m", X)
        client.close()
    assert caught.value.retry_after == 0
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("headers", "seconds"), [(["Retry-After: 3000"], 3000), ([], None)], ids=["too late", "for good"]
)
def test_it_is_asked_again_only_if_that_helps(
    connect: Connect, headers: list[str], seconds: float | None
) -> None:
    with fake_server(answering(refusal(503, "full", *headers))) as server:
        client = connect(server.url)
        with pytest.raises(ServerBusyError) as caught:
            client.infer("m", X, timeout=2000)
        client.close()
    assert caught.value.retry_after == seconds
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_the_timeout_of_a_second_attempt_is_what_is_left(connect: Connect, status: int) -> None:
    with fake_server(answering(refusal(status, "full", "Retry-After: 0"))) as server:
        client = connect(server.url)
        np.testing.assert_array_equal(client.infer("m", X, timeout=20), X)
        client.close()
    first, second = (request.json["parameters"]["timeout"] for request in server.requests)
    assert second < first


def test_the_priority_is_sent_if_there_is_one(connect: Connect) -> None:
    with fake_server(echoing) as server:
        client = connect(server.url)
        client.infer("m", X)
        client.infer("m", X, priority=7)
        client.close()
    without, given = (request.json["parameters"] for request in server.requests)
    assert "priority" not in without
    assert given["priority"] == 7


def busy_call(retry_after: float, seconds: float) -> Steps[object]:
    """A call whose answer is that the server is busy."""

    def read(connection: Connection, head: AnswerHead) -> Steps[object]:
        raise ServerBusyError("full", 503, retry_after)
        yield  # a generator all the same

    return Attempts(parse_address("http://x"), max_retries=1).call(lambda: [], read, Deadline(seconds))


def test_the_wait_is_retry_after_and_a_little() -> None:
    class Answered:
        """A connection that has a head."""

        sock = None
        start, buffer = 0, bytearray(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n")
        end = len(buffer)
        view = memoryview(buffer)

        def close(self) -> None:
            pass

    waits = set()
    for _ in range(50):
        call = busy_call(4, seconds=60)
        assert isinstance(next(call), ConnectWait)
        wait = call.send(Answered())
        assert isinstance(wait, Sleep)
        assert 4 <= wait.seconds <= 5.1
        waits.add(wait.seconds)
        call.close()
    assert len(waits) > 10, "callers that were refused together do not come back together"


def test_a_refusal_at_the_deadline_is_a_deadline_error(connect: Connect) -> None:
    """The server's own timer for `timeout` may fire when the client's does."""

    def handle(peer: Peer) -> None:
        request = peer.request()
        received = time.monotonic()
        while time.monotonic() - received < request.json["parameters"]["timeout"] / 1e6:
            pass
        peer.send(refusal(503, "the request's timeout expired in the queue"))

    with fake_server(handle) as server, pytest.raises(DeadlineError):
        connect(server.url).infer("m", X, timeout=0.1)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), ("soon", None), ("-1", None), (formatdate(0, usegmt=True), 0), ("99 Foo 2020", None)],
)
def test_retry_after_is_a_number_or_a_date(connect: Connect, header: str, seconds: float | None) -> None:
    with fake_server(answering(refusal(503, "full", f"Retry-After: {header}"))) as server:
        client = connect(server.url, max_retries=0)
        with pytest.raises(ServerBusyError) as caught:
            client.infer("m", X)
        client.close()
    assert caught.value.retry_after == seconds


def test_heads() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-LENGTH:7\r\nINFERENCE-header-content-length: 5 \r\nX-Y: z")
    assert head == AnswerHead(200, content_length=7, json_length=5)
    assert parse_head(b"HTTP/1.0 200\r\nContent-Length: 0").closes
    assert parse_head(b"HTTP/1.1 503 \r\nContent-Length: 0\r\nConnection: Close").closes
    assert parse_head(b"HTTP/1.1 100 Continue").content_length == -1
