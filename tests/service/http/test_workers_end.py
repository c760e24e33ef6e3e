"""Several HTTP processes: what happens when one of them ends, or the main one."""

import os
import re
import select
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.service.apps import MODEL, hidden_request, rows
from tests.service.http.processes import (
    GOOD,
    alive,
    asked,
    connected,
    samples,
    two_processes,
    workers_of,
)
from tests.service.http.test_signals import in_a_step
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import connect, infer
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
    with in_a_step(tmp_path, 2, drain_timeout_seconds=2) as (server, _, _):
        worker = workers_of(server)[0]
        server.terminate()
        wait_for(lambda: "shutting down" in server.log(), "the signal took effect")
        os.kill(worker, signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert re.search("ERROR .*HTTP process [01] ended with exit code -9$", server.log(), re.M)
