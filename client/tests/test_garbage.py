"""Answers that are not what the protocol says."""

from collections.abc import Callable

import numpy as np
import pytest

from expertd_client import InvalidAnswerError
from tests.callers import AnyCaller, Connect
from tests.fakes import Peer, answer, answering, echo, fake_server, output

X = np.arange(6, dtype=np.float32).reshape(2, 3)
BYTES = X.tobytes()
GOOD = output([2, 3], "FP32", BYTES)
GARBAGE = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "status 99": b"HTTP/1.1 099 x\r\n\r\n",
    "switching protocols": b"HTTP/1.1 101 x\r\n\r\n",
    "no colon": b"HTTP/1.1 200 x\r\nnonsense\r\n\r\n",
    "no length": b"HTTP/1.1 200 x\r\n\r\n",
    "negative length": b"HTTP/1.1 200 x\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a huge length": b"HTTP/1.1 200 x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "chunked": b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
    "compressed": GOOD.replace(b"\r\n", b"\r\nContent-Encoding: gzip\r\n", 1),
    "endless headers": b"HTTP/1.1 200 x\r\nX: " + b"y" * 70_000,
    "JSON longer than the body": answer(200, b"{}", "Inference-Header-Content-Length: 3"),
    "JSON without tensors": answer(200, b'{"outputs": []}'),
    "no content": answer(204),
    "too few bytes": output([2, 3], "FP32", BYTES[:-1]),
    "too many bytes": output([2, 3], "FP32", BYTES + b"x"),
    "other shape": output([3, 2], "FP32", BYTES),
    "other datatype": output([2, 3], "INT32", BYTES),
    "other name": output([2, 3], "FP32", BYTES, name="logits"),
    "no output": answer(200, b"{}" + BYTES, "Inference-Header-Content-Length: 2"),
    "a list": answer(200, b"[]" + BYTES, "Inference-Header-Content-Length: 2"),
    "broken JSON": answer(200, b"{]" + BYTES, "Inference-Header-Content-Length: 2"),
    "not UTF-8": answer(200, b"\xff\xff" + BYTES, "Inference-Header-Content-Length: 2"),
    "a large error": b"HTTP/1.1 500 x\r\nContent-Length: 999999999\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_an_error_and_closes_the_connection(connect: Connect, garbage: bytes) -> None:
    closed: list[bool] = []

    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(garbage)
        closed.append(peer.is_closed_by_client())

    with fake_server(handle) as server, pytest.raises(InvalidAnswerError, match=r"expected .*, got "):
        connect(server.url).infer("m", X)
    assert closed == [True]
    assert len(server.requests) == 1


def test_bytes_after_an_answer_end_the_connection(connect: Connect) -> None:
    with fake_server(answering(GOOD + b"HTTP/1.1 500 x\r\n")) as server:
        client = connect(server.url)
        np.testing.assert_array_equal(client.infer("m", X), X)
        np.testing.assert_array_equal(client.infer("m", X), X)
        client.close()
    assert server.num_connections == 2


def test_heads_in_small_pieces(connect: Connect) -> None:
    def handle(peer: Peer) -> None:
        whole = echo(peer.request())
        for number in range(len(whole)):
            peer.send(whole[number : number + 1])

    with fake_server(handle) as server:
        np.testing.assert_array_equal(connect(server.url).infer("m", X), X)


@pytest.mark.parametrize(
    ("call", "expected", "values"),
    [
        (
            lambda client: client.metadata("m"),
            "a MoE layer's metadata",
            ["{}", '{"inputs": []}', "[]", '"x"', "null", '{"name": "m", "inputs": [1]}'],
        ),
        (
            lambda client: client.server(),
            "a server's metadata",
            ["{}", "[]", "null", '{"name": "x", "version": "1", "extensions": 1}'],
        ),
        (
            lambda client: client.models(),
            "a list of models",
            ['{"error": 1}', "[1]", "null", '[{"name": "m"}]'],
        ),
    ],
    ids=["metadata", "server", "models"],
)
def test_answers_of_something_else(
    connect: Connect, call: Callable[[AnyCaller], object], expected: str, values: list[str]
) -> None:
    with fake_server(answering(*(answer(200, value.encode()) for value in values))) as server:
        client = connect(server.url)
        for _ in values:
            with pytest.raises(InvalidAnswerError, match=f"expected {expected}, got"):
                call(client)
        client.close()
    assert len(server.requests) == len(values)
