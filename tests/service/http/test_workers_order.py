"""Requests that wait in an HTTP process: their order, and how many may."""

import json
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service.apps import hidden_request, rows
from tests.service.http.processes import all_received, asked, pause, samples, two_processes, workers_of
from tests.service.keys import bearer, key_of, write_keys
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import connect, infer, read_answer
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process

ROOM = 10  # requests of one kind and caller in a channel, with the `max_buffered_bytes` below
WAITING = 40
LIMITS = {
    "max_buffered_bytes": 12_000_000,
    "max_queue_requests": WAITING,
    "queue_full_status": 429,
}


def request(name: str) -> bytes:
    return infer(*hidden_request(rows(1)), f"Authorization: Bearer {key_of(name)}")


def finished(server: ServerProcess) -> list[str]:
    """The keys of the requests that have been answered with an output, in the order of their ends."""
    lines = [json.loads(line) for line in server.log().splitlines() if '"infer 200"' in line]
    return [line["key"] for line in lines]


def test_callers_take_turns_and_what_may_wait_has_a_bound(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", a=["infer"], b=["infer"], metrics=["metrics"])
    settings = two_processes(LIMITS, keys=keys, access_log=True, log_format="json")
    with server_process(settings, tmp_path) as server, ExitStack() as stack:
        server.wait_ready()
        pause(workers_of(server)[0])  # the other one accepts all connections
        socks = [stack.enter_context(connect(server.port)) for _ in range(ROOM + WAITING + 1 + 3)]
        assert [asked(sock, request("a")).status for sock in socks[:-3]] == [200] * (ROOM + WAITING + 1)
        assert [asked(sock, request("b")).status for sock in socks[-3:]] == [200] * 3
        wait_for(lambda: len(finished(server)) == len(socks), "all have ended")
        *first, refused = socks[:-3]
        pause(server.process.pid)  # the engine's process: nothing is computed
        try:
            send(first, "a")
            wait_for(lambda: all_received(server), "the requests of a wait")
            refused.sendall(request("a").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            answer = read_answer(refused)
            assert answer.status == 429, "from the headers"
            assert int(answer.headers["retry-after"]) >= 1
            assert b"40 requests of at most 40 are waiting" in answer.body
            for sock in socks[-3:]:  # one after another: the event loop reads sockets in any order
                send([sock], "b")
                wait_for(lambda: all_received(server), "the requests of b wait")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        answers = [read_answer(sock).status for sock in (*first, *socks[-3:])]
        assert answers[:-3] == [200] * (ROOM + WAITING)
        assert answers[-3] == 200, "the first one of b found room"
        assert answers[-2:] == [200, 429], "others do not shut it out, and it has one that waits"
        ended = 2 * len(socks) - 2  # but for the refused ones
        wait_for(lambda: len(finished(server)) == ended, "all have ended")
        order = finished(server)[len(socks) :]
        last = len(order) - 1 - order[::-1].index("b")
        assert order[:last].count("a") < ROOM + WAITING // 2, order
        os.kill(workers_of(server)[0], signal.SIGCONT)
        assert samples(server, "queue_requests", bearer("metrics")) == {}


def send(socks: list[socket.socket], name: str) -> None:
    for sock in socks:
        sock.sendall(request(name))


def test_what_waited_in_a_process_that_dies_fills_no_queue(tmp_path: Path) -> None:
    settings = two_processes({**LIMITS, "max_queue_requests": 20})
    with server_process(settings, tmp_path) as server, ExitStack() as stack:
        server.wait_ready()
        stopped, dies = workers_of(server)
        pause(stopped)  # the other one accepts all connections
        socks = [stack.enter_context(connect(server.port)) for _ in range(ROOM + 20)]
        assert {asked(sock, infer(*hidden_request(rows(1)))).status for sock in socks} == {200}
        pause(server.process.pid)  # the engine's process: nothing is computed
        for sock in socks:
            sock.sendall(infer(*hidden_request(rows(1))))
        wait_for(lambda: all_received(server), "the requests wait")
        os.kill(stopped, signal.SIGCONT)
        with connect(server.port) as sock:  # accepted by the one that has no connections
            assert asked(sock, infer(*hidden_request(rows(1)))).status == 429, "what waits elsewhere counts"
        os.kill(dies, signal.SIGKILL)
        os.kill(server.process.pid, signal.SIGCONT)
        wait_for(lambda: dies not in workers_of(server) and len(workers_of(server)) == 2, "it is replaced")
        with connect(server.port) as sock:
            assert asked(sock, infer(*hidden_request(rows(1)))).status == 200
        assert samples(server, "queue_requests") == {}
