"""Callers compare what a stand-in for the server answers, and notice what it drops when it is stopped."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.service.apps import tiny_settings
from tests.service.sockets import Answer, read_answer
from tests.service.waiting import wait_for
from tests.soak.plan import Plan
from tests.soak.reference import Sample, samples
from tests.soak.server import stop
from tests.soak.sockets import in_json, json_request, outcome_of_answer, slow
from tests.soak.tally import Stage, Tally

ONE = {1: 1}  # a token
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class StandIn:
    """Reads requests, and answers none until it is stopped: then it refuses or drops them."""

    def __init__(self, drops: bool) -> None:
        self._drops = drops
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._whole: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_whole(self) -> int:
        return len(self._whole)

    def terminate(self) -> int:
        with self._lock:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for sock in self._whole:
                if not self._drops:
                    sock.sendall(REFUSAL)
                sock.close()
        return 0

    def _accept(self) -> None:
        try:
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        except OSError:
            return

    def _serve(self, sock: socket.socket) -> None:
        data = bytearray()
        while not is_whole(bytes(data)):
            piece = b""
            with suppress(ConnectionResetError):
                piece = sock.recv(1 << 16)
            if not piece:
                sock.close()
                return
            data += piece
        if data.startswith(b"GET"):  # a health check
            with sock:
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        with self._lock:
            self._whole.append(sock)


def is_whole(data: bytes) -> bool:
    """Whether it has a request's head, and the body that this announces."""
    top, end, body = data.partition(b"\r\n\r\n")
    length = top.lower().partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0]
    return bool(end) and len(body) >= int(length or 0)


@contextmanager
def calling(plan: Plan, caller: object, tally: Tally) -> Iterator[None]:
    assert callable(caller)
    thread = threading.Thread(target=caller, args=(plan, tally))
    thread.start()
    try:
        yield
    finally:
        plan.stage.finish()
        thread.join()


@pytest.mark.parametrize(("caller", "count"), [(in_json, 2), (slow, 1)])
@pytest.mark.parametrize("drops", [False, True])
def test_what_a_stopped_server_drops_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caller: object, count: int, drops: bool
) -> None:
    waiting: list[socket.socket] = []

    def read(sock: socket.socket) -> Answer:
        waiting.append(sock)
        return read_answer(sock)

    monkeypatch.setattr("tests.soak.sockets.read_answer", read)
    server, stage, tally = StandIn(drops), Stage(), Tally("a")
    plan = Plan(tmp_path, server.port, 0, samples(tiny_settings(), 1, ONE)[:1], stage)
    with calling(plan, caller, tally):
        wait_for(lambda: server.num_whole == count == len(waiting), "it has the requests, as callers know")
        wait_for(lambda: stop(server, stage) == 0, "it has ended")
    counts = tally.counts()
    assert (counts["lost"], counts["refused"]) == ((count, 0) if drops else (0, count))
    assert counts["right"] == counts["wrong"] == counts["failed"] == 0


def answer_of(sample: Sample, factor: float = 1.0, status: int = 200) -> Answer:
    output = factor * sample.output
    body = {"outputs": [{"shape": output.shape, "data": output.ravel().tolist()}]}
    return Answer(status, {}, json.dumps(body).encode())


def test_answers_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    sample, *_ = samples(tiny_settings(), 1, ONE)
    assert outcome_of_answer(answer_of(sample), sample) == "right"
    assert outcome_of_answer(answer_of(sample, 1.1), sample) == "wrong"
    head = json.dumps({"outputs": [{"shape": sample.output.shape}]}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    for factor, outcome in ((1, "right"), (-1, "wrong")):
        values = np.float32(factor) * sample.output
        assert outcome_of_answer(Answer(200, headers, head + values.tobytes()), sample) == outcome
    assert outcome_of_answer(answer_of(sample, status=503), sample) == "refused"
    assert outcome_of_answer(answer_of(sample, status=500), sample) == "failed"
    assert outcome_of_answer(answer_of(sample, status=400), sample) == "wrong"
    assert "soak: 400" in capsys.readouterr().out


def test_a_request_in_json_has_all_tensors() -> None:
    sample = samples(tiny_settings(), 1, ONE)[2]
    body = json.loads(json_request(sample, "key", 7).partition(b"\r\n\r\n")[2])
    assert [each["name"] for each in body["inputs"]] == ["hidden_states", "topk_ids", "topk_weights"]
    np.testing.assert_array_equal(body["inputs"][0]["data"], sample.hidden_states.ravel())
    assert body["parameters"] == {"priority": 7}
