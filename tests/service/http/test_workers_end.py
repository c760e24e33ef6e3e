"""Several HTTP processes: what happens when one of them ends, or the main one, or all by a signal."""

import os
import re
import select
import signal
import socket
import struct
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.apps import MODEL, hidden_request, rows
from tests.service.held_steps import HeldSteps
from tests.service.http.processes import (
    GOOD,
    alive,
    asked,
    connected,
    samples,
    two_processes,
    workers_of,
)
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import Answer, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process each

TOKENS = 64


def test_a_killed_process_costs_only_its_own_connections(tmp_path: Path) -> None:
    def channels() -> int:
        return Path(f"/proc/{server.process.pid}/maps").read_text().count("/memfd:expertd-channel")

    limits = {"max_request_tokens": 256, "max_body_bytes": 1 << 20}
    with server_process(two_processes(limits), tmp_path) as server, ExitStack() as stack:
        socks = connected(stack, server, 8)
        for sock in connected(stack, server, 4):
            sock.sendall(infer(*hidden_request(rows(256)))[:-1])
        wait_for(lambda: len(samples(server, "buffered_bytes")) == 2, "both have bodies in their memory")
        before, memory = workers_of(server), channels()
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: len(samples(server, "buffered_bytes")) == 1, "its bodies are gone")
        survivors = []
        for sock in socks:
            try:
                answer = asked(sock, GOOD)
            except (OSError, AssertionError):
                continue
            assert answer.status == 200
            survivors.append(sock)
        assert 2 <= len(survivors) <= 6, "both processes have some"
        wait_for(lambda: len(workers_of(server)) == 2, "it is replaced")
        assert "HTTP process" in server.log()
        assert "ended with exit code -9: starting another" in server.log()
        assert before[1] in workers_of(server)
        connected(stack, server, 2)
        wait_for(lambda: channels() == memory, "its channel's memory is freed")
        server.terminate()
        assert server.process.wait(30) == 0


def folder_of(server: ServerProcess) -> Path:
    """Where the socket between the processes is."""
    files = {str(file.readlink()) for file in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = {Path(line[7]) for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in files}
    (path,) = (path for path in named if path.name == "engine")
    return path.parent


def test_the_processes_end_with_the_main_one(tmp_path: Path) -> None:
    with server_process(two_processes(), tmp_path) as server:
        workers = workers_of(server)
        folder = folder_of(server)
        assert folder.name.startswith("expertd-")
        assert folder.stat().st_mode & 0o777 == 0o700
        server.process.kill()
        wait_for(lambda: not any(map(alive, workers)), "they end", seconds=1.5)
        wait_for(lambda: not folder.exists(), "nothing is left")


def in_a_step(
    stack: ExitStack, directory: Path, **more: Any
) -> tuple[ServerProcess, list[socket.socket], HeldSteps]:
    """A server in a step for the first of five clients, while the others' requests wait."""
    limits = {"max_request_tokens": TOKENS, "max_batch_tokens": TOKENS}  # so that no two share a step
    steps = HeldSteps(directory)
    server = stack.enter_context(
        server_process(two_processes(limits, **more), directory, environment=steps.environment)
    )
    socks = connected(stack, server, 5)
    steps.hold()
    for sock in socks:
        sock.sendall(infer(*hidden_request(rows(TOKENS))))
        steps.wait_for_one()
    wait_for(lambda: samples(server, "queue_requests").get(("tiny",)) == 4, "one is in the step, four wait")
    return server, socks, steps


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_answers_everything_accepted(tmp_path: Path, number: signal.Signals) -> None:
    with ExitStack() as stack:
        server, socks, steps = in_a_step(stack, tmp_path, drain_timeout_seconds=120)
        idle = stack.enter_context(connect(server.port))
        server.process.send_signal(number)
        wait_for(lambda: "shutting down" in server.log(), "the signal took effect")
        with connect(server.port) as sock:
            sock.sendall(head("GET /v2/health/ready HTTP/1.1"))
            (ready,) = read_to_end(sock)
            assert (ready.status, ready.headers["connection"]) == (503, "close")
        steps.release()
        for sock in socks:
            (answer,) = read_to_end(sock)
            assert answer.status == 200, answer.body
            assert answer.headers["connection"] == "close"
        assert read_to_end(idle) == []
        assert server.process.wait(60) == 0
        for word in ("Traceback", "ERROR"):
            assert word not in server.log()
        last = server.log().splitlines()[-1]
        assert last.endswith(f": ended; infer requests answered: {2 * len(socks)}, refused or cancelled: 0")


def test_sigterm_to_every_process_is_one_signal(tmp_path: Path) -> None:
    with server_process(two_processes(), tmp_path) as server:
        for pid in (*workers_of(server), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert "ERROR" not in server.log()


def test_a_process_that_is_signalled_alone_goes_on(tmp_path: Path) -> None:
    with server_process(two_processes(), tmp_path) as server, ExitStack() as stack:
        os.kill(workers_of(server)[0], signal.SIGTERM)
        for sock in connected(stack, server, 8):
            assert "connection" not in asked(sock, GOOD).headers
        assert "HTTP process" not in server.log(), "none has ended"


def test_after_the_drain_nobody_can_connect(tmp_path: Path) -> None:
    """A client that does not read its answer keeps the processes."""
    large = memoryview(infer(*hidden_request(np.ones((64, 1024), np.float32))))
    settings = two_processes(models=[{**MODEL, "hidden_size": 1024}], drain_timeout_seconds=30)
    with server_process(settings, tmp_path) as server, connect(server.port) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent = 0
        while select.select([], [sock], [], 0.5)[1]:  # until it reads no more: its answers are not read
            sent += sock.send(large[sent % len(large) :])

        def is_refused() -> bool:
            try:
                connect(server.port).close()
            except ConnectionRefusedError:
                return True
            return False

        server.terminate()
        wait_for(is_refused, "new connections are refused", seconds=20)
        assert server.process.poll() is None, "it has not ended"


def test_a_process_that_is_killed_during_the_drain_is_in_the_log(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server, _, _ = in_a_step(stack, tmp_path, drain_timeout_seconds=2)
        worker = workers_of(server)[0]
        server.terminate()
        wait_for(lambda: "shutting down" in server.log(), "the signal took effect")
        os.kill(worker, signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert re.search("ERROR .*HTTP process [01] ended with exit code -9$", server.log(), re.M)


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    def end_of(sock: socket.socket) -> list[Answer]:
        try:
            return read_to_end(sock)
        except ConnectionResetError:
            return []

    with ExitStack() as stack:
        server, socks, _ = in_a_step(stack, tmp_path)
        workers = workers_of(server)
        server.terminate()
        wait_for(lambda: "shutting down" in server.log(), "the first signal took effect")
        server.terminate()
        answers = [answer for sock in socks for answer in end_of(sock)]
        stopped = [answer for answer in answers if answer.status == 503]
        assert len(stopped) >= 2
        for answer in stopped:
            assert answer.error == "the server was stopped before the response was ready"
        assert server.process.wait(30) == 1
        wait_for(lambda: not any(map(alive, workers)), "they end")
        assert "Traceback" not in server.log()


def test_load_during_a_drain_loses_nothing(tmp_path: Path) -> None:
    answers: list[int] = []
    failures: list[Exception] = []

    def call(port: int) -> None:
        """Ask until the server announces the end of the connection."""
        try:
            with connect(port) as sock:
                while True:
                    answer = asked(sock, GOOD)
                    answers.append(answer.status)
                    if answer.headers.get("connection") == "close":
                        return
        except Exception as error:
            failures.append(error)

    with server_process(two_processes(shutdown_delay_seconds=0.5), tmp_path) as server, ExitStack() as stack:
        connected(stack, server, 2)
        callers = [threading.Thread(target=call, args=(server.port,)) for _ in range(8)]
        for caller in callers:
            caller.start()
        wait_for(lambda: len(answers) > 200, "there is load")
        server.terminate()
        for caller in callers:
            caller.join(60)
        assert failures == []
        assert set(answers) == {200}
        assert server.process.wait(30) == 0
        assert "ERROR" not in server.log()


def test_a_client_that_leaves_frees_its_place_in_the_queue(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server, socks, steps = in_a_step(stack, tmp_path)
        for sock in socks[1:]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        wait_for(lambda: samples(server, "requests_total").get(("tiny", "499")) == 4, "they are counted")
        steps.release()
        assert read_answer(socks[0]).status == 200
        wait_for(lambda: not samples(server, "queue_requests"), "nothing waits")
        assert samples(server, "tokens_total")["contiguous", "tiny"] == 5 * 3 + TOKENS
