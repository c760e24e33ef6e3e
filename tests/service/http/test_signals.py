"""Shutdown by signals: how fast, with which exit code, and what clients of one process or several receive."""

import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paths import DEMO
from tests.service.apps import HIDDEN, hidden_request, limits_for, rows, tiny_settings
from tests.service.held_steps import HeldSteps
from tests.service.http.processes import GOOD, alive, asked, connected, samples, two_processes, workers_of
from tests.service.processes import EXPERTD, ServerProcess, clean_environment, server_process
from tests.service.sockets import Answer, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process each

TOKENS = 64
SIZE = infer(*hidden_request(rows(TOKENS)))


@contextmanager
def in_a_step(
    directory: Path, http_workers: int = 1, **settings: Any
) -> Iterator[tuple[ServerProcess, list[socket.socket], HeldSteps]]:
    """A server that runs a step for one client; four wait, one has sent half a request, one nothing."""
    limits = {"max_request_tokens": TOKENS, "max_batch_tokens": TOKENS}  # so that no two share a step
    steps = HeldSteps(directory)
    with ExitStack() as stack:
        used = two_processes(limits, http_workers=http_workers, **settings)
        server = stack.enter_context(server_process(used, directory, environment=steps.environment))
        if http_workers > 1:
            socks = connected(stack, server, 7)
        else:
            socks = [stack.enter_context(connect(server.port)) for _ in range(7)]
        steps.hold()
        for sock in socks[:5]:
            sock.sendall(SIZE)
            steps.wait_for_one()
        socks[5].sendall(SIZE[:1000])
        wait_for(lambda: samples(server, "queue_requests").get(("tiny",)) == 4, "one is in the step")
        yield server, socks, steps


def ended(sock: socket.socket) -> list[Answer]:
    try:
        return read_to_end(sock)
    except ConnectionResetError:  # the server had not read all of its request
        return []


@pytest.mark.parametrize(
    ("signals", "http_workers"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 1),
        ((signal.SIGHUP, signal.SIGINT), 1),
        ((signal.SIGTERM, signal.SIGTERM), 2),
    ],
)
def test_a_second_signal_exits_at_once(
    tmp_path: Path, signals: tuple[signal.Signals, ...], http_workers: int
) -> None:
    channels = tmp_path / "channels"
    settings = {"channels": {"socket": str(channels)}, "drain_timeout_seconds": 600}
    with in_a_step(tmp_path, http_workers, **settings) as (server, socks, _):
        workers = workers_of(server)
        server.process.send_signal(signals[0])
        wait_for(lambda: "shutting down" in server.log(), "the first signal took effect")
        server.process.send_signal(signals[1])
        answers = [answer for sock in socks[:5] for answer in ended(sock)]
        assert len(answers) == 5 if http_workers == 1 else len(answers) >= 2
        for answer in answers:
            assert answer.status == 503
            assert answer.error == "the server was stopped before the response was ready"
            assert answer.headers["connection"] == "close"
            assert "retry-after" not in answer.headers, "nobody knows when a server is there again"
        if http_workers == 1:
            assert ended(socks[5])[0].status == 503
        assert ended(socks[6]) == []
        assert server.process.wait(60) == 1
        wait_for(lambda: not any(map(alive, workers)), "they end")
        if http_workers == 1:
            assert "second signal: exiting at once, with unanswered requests: 5" in server.log()
            for word in ("Error", "ERROR", "terminate"):
                assert word not in server.log()
        assert "Traceback" not in server.log()
        assert not channels.exists()


def test_two_signals_at_once_promise_no_answers(tmp_path: Path) -> None:
    with in_a_step(tmp_path) as (server, _, _):
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            server.process.send_signal(number)
        assert server.process.wait(60) == 1
        assert "second signal: exiting at once, with unanswered requests: 5" in server.log()
        assert "shutting down after all accepted requests are answered" not in server.log()


def test_a_step_longer_than_the_drain_timeout_exits_with_1_and_json(tmp_path: Path) -> None:
    with in_a_step(tmp_path, drain_timeout_seconds=0.2) as (server, socks, _):
        server.terminate()
        for sock in socks[:5]:
            (answer,) = read_to_end(sock)
            assert answer.status == 503
            assert "shutting down" in answer.error
        assert server.process.wait(60) == 1
        text = "still unanswered after drain_timeout_seconds: 5, and no longer waited for"
        assert text in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_answers_everything_accepted(tmp_path: Path, number: signal.Signals) -> None:
    with in_a_step(tmp_path, 2, drain_timeout_seconds=120) as (server, socks, steps):
        socks[5].close()
        server.process.send_signal(number)
        wait_for(lambda: "shutting down" in server.log(), "the signal took effect")
        with connect(server.port) as sock:
            sock.sendall(head("GET /v2/health/ready HTTP/1.1"))
            (ready,) = read_to_end(sock)
            assert (ready.status, ready.headers["connection"]) == (503, "close")
        steps.release()
        for sock in socks[:5]:
            (answer,) = read_to_end(sock)
            assert answer.status == 200, answer.body
            assert answer.headers["connection"] == "close"
        assert read_to_end(socks[6]) == []
        assert server.process.wait(60) == 0
        for word in ("Traceback", "ERROR"):
            assert word not in server.log()
        last = server.log().splitlines()[-1]
        assert last.endswith(": ended; infer requests answered: 12, refused or cancelled: 1")


def test_sighup_drains(tmp_path: Path) -> None:
    steps = HeldSteps(tmp_path)
    with (
        server_process(tiny_settings(), tmp_path, environment=steps.environment) as server,
        connect(server.port) as waiting,
        connect(server.port) as sock,
    ):
        for request in (GOOD, infer(b"{", 1)):
            asked(sock, request)
        steps.hold()
        waiting.sendall(GOOD)
        steps.wait_for_one()
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.get("/v2/health/ready").status_code == 503, "it is not ready")
        assert asked(sock, head("GET /v2/health/live HTTP/1.1")).status == 200
        steps.release()
        assert read_answer(waiting).status == 200
        assert server.process.wait(60) == 0
        last = server.log().splitlines()[-1]
        assert last.endswith(": ended; infer requests answered: 2, refused or cancelled: 1")


@pytest.mark.parametrize("http_workers", [1, 2])
def test_kept_alive_connections_learn_of_sigterm_at_once(tmp_path: Path, http_workers: int) -> None:
    """The first answer after the signal says so, and is the last one of its connection."""
    probe = head("GET /v2/health/ready HTTP/1.1")
    settings = tiny_settings(shutdown_delay_seconds=600, http_workers=http_workers)
    with server_process(settings, tmp_path) as server, ExitStack() as stack:
        probing = [stack.enter_context(connect(server.port)) for _ in range(4)]
        working = [stack.enter_context(connect(server.port)) for _ in range(4)]
        for socks, request in ((probing, probe), (working, GOOD)):
            for sock in socks:
                answer = asked(sock, request)
                assert (answer.status, answer.headers.get("connection")) == (200, None)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "shutting down" in server.log(), "the signal took effect")
        for sock in probing:
            sock.sendall(probe)
        for sock in probing:
            (answer,) = read_to_end(sock)
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert answer.error == "the server is draining"
        for sock in working:
            sock.sendall(GOOD)
            (answer,) = read_to_end(sock)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1, "the delay is not over"


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

    settings = two_processes(shutdown_delay_seconds=2)  # much longer than between two requests of a caller
    with server_process(settings, tmp_path) as server, ExitStack() as stack:
        connected(stack, server, 2)
        callers = [threading.Thread(target=call, args=(server.port,)) for _ in range(8)]
        for caller in callers:
            caller.start()
        wait_for(lambda: len(answers) > 200, "there is load")
        for pid in (*workers_of(server), server.process.pid):  # as of a terminal or a container: one signal
            os.kill(pid, signal.SIGTERM)
        for caller in callers:
            caller.join(60)
        assert failures == []
        assert set(answers) == {200}
        assert server.process.wait(60) == 0
        assert "ERROR" not in server.log()


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
    request = infer(*hidden_request(np.ones((tokens, HIDDEN), np.float32)))  # before the connection idles
    with (
        server_process(tiny_settings(limits_for(tokens), **settings), tmp_path) as server,
        connect(server.port, receive_buffer=4096) as sock,
    ):
        sock.sendall(request)
        computed = f'expertd_batch_tokens_sum{{layout="contiguous",model="tiny"}} {float(tokens)}'
        wait_for(lambda: computed in server.get("/metrics").text, "the answer is computed")
        server.terminate()
        assert server.process.wait(60) == 1
        assert message in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("http_workers", [1, 2])
def test_clients_that_disconnected_are_not_computed_and_do_not_delay_shutdown(
    tmp_path: Path, http_workers: int
) -> None:
    with in_a_step(tmp_path, http_workers, drain_timeout_seconds=600) as (server, socks, steps):
        for sock in socks[1:]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        wait_for(lambda: samples(server, "requests_total").get(("tiny", "499")) == 5, "they are counted")
        assert not samples(server, "queue_requests")
        server.terminate()
        steps.release()
        (answer,) = read_to_end(socks[0])
        assert answer.status == 200
        assert server.process.wait(60) == 0
        last = server.log().splitlines()[-1]
        assert last.endswith(f"answered: {1 if http_workers == 1 else 8}, refused or cancelled: 5")


@pytest.mark.thorough  # a process that is new
def test_sighup_is_ignored_under_nohup(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    address = ["--host", "127.0.0.1", "--port", "0"]
    command: list[str | Path] = ["nohup", EXPERTD, "serve", "--config", DEMO, *address]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=stderr, env=clean_environment())
    try:
        server = ServerProcess(process, log)
        server.wait_ready()
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(60) == 0, "only one of the two signals counts"
        assert log.read_text().count("shutting down") == 1
    finally:
        process.kill()
        process.wait()
