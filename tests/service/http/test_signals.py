"""Shutdown by signals: how fast, with which exit code, and what clients receive."""

import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paths import DEMO
from tests.service.apps import HIDDEN, hidden_request, tiny_settings
from tests.service.held_steps import HeldSteps
from tests.service.processes import EXPERTD, ServerProcess, clean_environment, server_process
from tests.service.sockets import Answer, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process each

TOKENS = 64


@contextmanager
def in_a_step(
    directory: Path, **settings: Any
) -> Iterator[tuple[ServerProcess, list[socket.socket], HeldSteps]]:
    """A server that runs a step for one client; the next waits, one has sent half a request, one nothing."""
    limits = {"max_request_tokens": TOKENS, "max_batch_tokens": TOKENS}  # so that the two never share a step
    request = infer(*hidden_request(np.ones((TOKENS, HIDDEN), np.float32)))
    steps = HeldSteps(directory)
    with ExitStack() as stack:
        started = server_process(tiny_settings(limits, **settings), directory, environment=steps.environment)
        server = stack.enter_context(started)
        steps.hold()
        socks = [stack.enter_context(connect(server.port)) for _ in range(4)]
        for sock in socks[:2]:
            sock.sendall(request)
            steps.wait_for_one()
        socks[2].sendall(request[:1000])
        waiting = 'expertd_queue_requests{model="tiny"} 1.0'
        wait_for(lambda: waiting in server.get("/metrics").text, "one is in the step, one waits")
        yield server, socks, steps


def ended(sock: socket.socket) -> list[Answer]:
    try:
        return read_to_end(sock)
    except ConnectionResetError:  # the server had not read all of its request
        return []


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGINT),
    ],
    ids=lambda signals: "+".join(number.name for number in signals),
)
def test_a_second_signal_exits_at_once(tmp_path: Path, signals: tuple[signal.Signals, ...]) -> None:
    channels = tmp_path / "channels"
    with in_a_step(tmp_path, channels={"socket": str(channels)}) as (server, socks, _):
        assert channels.is_socket()
        server.process.send_signal(signals[0])
        wait_for(lambda: "shutting down" in server.log(), "the first signal took effect")
        server.process.send_signal(signals[1])
        for sock in socks[:2]:
            (answer,) = read_to_end(sock)
            assert answer.status == 503
            assert answer.error == "the server was stopped before the response was ready"
            assert answer.headers["connection"] == "close"
            assert "retry-after" not in answer.headers, "nobody knows when a server is there again"
        assert ended(socks[2])[0].status == 503
        assert ended(socks[3]) == []
        assert server.process.wait(30) == 1
        log = server.log()
        assert "second signal: exiting at once, with unanswered requests: 2" in log
        assert not channels.exists()
        for word in ("Traceback", "Error", "ERROR", "terminate"):
            assert word not in log


def test_two_signals_at_once_promise_no_answers(tmp_path: Path) -> None:
    with in_a_step(tmp_path) as (server, _, _):
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            server.process.send_signal(number)
        assert server.process.wait(30) == 1
        assert "second signal: exiting at once, with unanswered requests: 2" in server.log()
        assert "shutting down after all accepted requests are answered" not in server.log()


def test_a_step_longer_than_the_drain_timeout_exits_with_1_and_json(tmp_path: Path) -> None:
    with in_a_step(tmp_path, drain_timeout_seconds=0.2) as (server, socks, _):
        server.terminate()
        for sock in socks[:2]:
            (answer,) = read_to_end(sock)
            assert answer.status == 503
            assert "shutting down" in answer.error
        assert server.process.wait(30) == 1
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    with server_process(tiny_settings(shutdown_delay_seconds=1), tmp_path) as server:
        with connect(server.port) as sock:
            for request in (infer(*hidden_request(np.ones((3, HIDDEN), np.float32))), infer(b"{", 1)):
                sock.sendall(request)
                read_answer(sock)
            server.process.send_signal(number)
            wait_for(lambda: server.get("/v2/health/ready").status_code == 503, "it is not ready")
            sock.sendall(head("GET /v2/health/live HTTP/1.1"))
            assert read_answer(sock).status == 200
        assert server.process.wait(30) == 0
        assert "shutting down" in server.log()
        last = server.log().splitlines()[-1]
        assert last.endswith(": ended; infer requests answered: 1, refused or cancelled: 1")


@pytest.mark.parametrize("http_workers", [1, 2])
def test_kept_alive_connections_learn_of_sigterm_at_once(tmp_path: Path, http_workers: int) -> None:
    """The first answer after the signal says so, and is the last one of its connection."""
    probe = head("GET /v2/health/ready HTTP/1.1")
    good = infer(*hidden_request(np.ones((3, HIDDEN), np.float32)))
    settings = tiny_settings(shutdown_delay_seconds=600, http_workers=http_workers)
    with server_process(settings, tmp_path) as server, ExitStack() as stack:
        probing = [stack.enter_context(connect(server.port)) for _ in range(4)]
        working = [stack.enter_context(connect(server.port)) for _ in range(4)]
        for socks, request in ((probing, probe), (working, good)):
            for sock in socks:
                sock.sendall(request)
                answer = read_answer(sock)
                assert (answer.status, answer.headers.get("connection")) == (200, None)
        server.process.send_signal(signal.SIGTERM)
        for sock in probing:
            sock.sendall(probe)
        for sock in probing:
            (answer,) = read_to_end(sock)
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert answer.error == "the server is draining"
        for sock in working:
            sock.sendall(good)
            (answer,) = read_to_end(sock)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 1, "the delay is not over"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drain_timeout_seconds": 1}, "connections with unsent or unread responses, closed now: 1"),
        ({"keep_alive_seconds": 1}, "connections closed before their responses were read: 1"),
    ],
)
def test_unread_responses_make_it_exit_with_1(
    tmp_path: Path, settings: dict[str, float], message: str
) -> None:
    tokens = 32768
    limits = {
        "max_request_tokens": tokens,
        "max_batch_tokens": tokens,
        "max_queue_tokens": 4 * tokens,
        "max_body_bytes": 8 * tokens * HIDDEN,
    }
    request = infer(*hidden_request(np.ones((tokens, HIDDEN), np.float32)))
    with (
        server_process(tiny_settings(limits=limits, **settings), tmp_path) as server,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request)
        computed = f'expertd_batch_tokens_sum{{layout="contiguous",model="tiny"}} {float(tokens)}'
        wait_for(lambda: computed in server.get("/metrics").text, "the answer is computed")
        server.terminate()
        assert server.process.wait(30) == 1
        assert message in server.log()
        assert "Traceback" not in server.log()


def test_clients_that_disconnected_do_not_delay_shutdown(tmp_path: Path) -> None:
    with in_a_step(tmp_path, drain_timeout_seconds=600) as (server, socks, steps):
        for sock in socks[1:]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        server.terminate()
        steps.release()
        (answer,) = read_to_end(socks[0])
        assert answer.status == 200
        assert server.process.wait(30) == 0


def test_sighup_is_ignored_under_nohup(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command: list[str | Path] = [
        "nohup",
        EXPERTD,
        "serve",
        "--config",
        DEMO,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=stderr, env=clean_environment())
    try:
        server = ServerProcess(process, log)
        server.wait_ready()
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(30) == 0, "only one of the two signals counts"
        assert log.read_text().count("shutting down") == 1
    finally:
        process.kill()
        process.wait()
