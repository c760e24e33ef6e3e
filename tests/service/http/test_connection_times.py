"""Timeouts of silent and slow connections, and their maximum number, over raw sockets."""

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from expertd.service.http import server as http_server
from expertd.service.http.listening import allow_files
from tests.service.apps import hidden_request, rows, serving, tiny_settings
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import INFER, ask, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import until, wait_for

pytestmark = pytest.mark.slow  # times are seconds

LIVE = head("GET /v2/health/live HTTP/1.1")
LAST = head("GET /v2/health/live HTTP/1.1", "Connection: close")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    limits = {"header_timeout_seconds": 0.75, "body_timeout_seconds": 4}
    settings = tiny_settings(limits, keep_alive_seconds=3)  # a busy client must not be late by as much
    with server_process(settings, tmp_path_factory.mktemp("server")) as process:
        yield process
        assert "Traceback" not in process.log()


class Dribble(threading.Thread):
    """Sends `piece` repeatedly until the server closes the connection."""

    def __init__(self, sock: socket.socket, piece: bytes) -> None:
        super().__init__()
        self._sock, self._piece = sock, piece
        self.start()

    def run(self) -> None:
        try:
            while True:
                self._sock.sendall(self._piece)
                time.sleep(0.05)
        except OSError:
            pass


def test_a_silent_and_an_idle_connection_are_closed(server: ServerProcess) -> None:
    started = time.monotonic()
    with connect(server.port) as silent, connect(server.port) as idle:
        idle.sendall(LIVE)
        assert read_answer(idle).status == 200
        assert read_to_end(silent) == read_to_end(idle) == []
    assert time.monotonic() - started >= 2.9


@pytest.mark.parametrize("sent", [b"G", LIVE[:-2], LIVE + LIVE[:-2]], ids=["byte", "most", "after another"])
def test_an_incomplete_head_times_out(server: ServerProcess, sent: bytes) -> None:
    got = ask(server.port, sent)
    if len(sent) > len(LIVE):
        assert got.pop(0).status == 200
    for answer in got:
        assert answer.status == 408
        assert answer.error == "headers: expected all headers within 0.75 s, got a part of them"
        assert answer.headers["connection"] == "close"
    assert got or len(sent) > len(LIVE), "after another request, it also counts as idle"


@pytest.mark.parametrize("piece", [b"x", b"\r\n"], ids=["head", "blank lines"])
@pytest.mark.parametrize("before", [b"", LIVE], ids=["first", "second"])
def test_a_slow_head_times_out(server: ServerProcess, piece: bytes, before: bytes) -> None:
    begin = b"" if piece == b"\r\n" else b"GET /v2 HTTP/1.1\r\nX: "
    with connect(server.port) as sock:
        if before:
            sock.sendall(before)
            assert read_answer(sock).status == 200
        sock.sendall(begin)
        dribble = Dribble(sock, piece)
        answer = read_answer(sock)
        assert sock.recv(1000) == b""
        sock.shutdown(socket.SHUT_RDWR)
        dribble.join(60)
    assert answer.status == 408


def test_a_slow_body_after_its_response_times_out(server: ServerProcess) -> None:
    with connect(server.port) as sock:
        sock.sendall(head(f"POST {INFER} HTTP/1.1", f"Content-Length: {2 << 20}"))
        assert read_answer(sock).status == 413
        dribble = Dribble(sock, b"x")
        dribble.join(60)
        assert not dribble.is_alive()


def test_a_body_after_its_response_keeps_the_connection_open(server: ServerProcess) -> None:
    with connect(server.port) as sock:
        sock.sendall(head(f"POST {INFER} HTTP/1.1", f"Content-Length: {2 << 20}"))
        assert read_answer(sock).status == 413
        sock.sendall(bytes(2 << 20))
        sock.sendall(infer(*hidden_request(rows(1))))
        assert read_answer(sock).status == 200
        assert read_to_end(sock) == [], "idle again"


# Python runs it at the start of the server: the first one lingers until the last one has come.
LINGERING = "from expertd.service.http import connection; connection._LINGER_SECONDS = 60.0"


def test_connections_beyond_the_limit_get_503(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LINGERING)
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    with server_process(tiny_settings({"max_connections": 2}), tmp_path, environment=paths) as server:
        wait_for(lambda: ask(server.port, LAST)[0].status == 200, "the health check's connection is closed")
        socks = [connect(server.port) for _ in range(2)]
        for sock in socks:
            sock.sendall(LIVE)
            assert read_answer(sock).status == 200
        for data in (b"", LIVE, infer(*hidden_request(rows(64)))):
            (answer,) = ask(server.port, data)
            assert answer.status == 503
            assert answer.error == "connections: expected at most 2, got 3"
            assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "1")
        text = "limits.max_connections: 2 connections are open, further ones are refused"
        assert server.log().count(text) == 1
        for sock in socks:
            sock.sendall(LIVE)
            assert read_answer(sock).status == 200, "open connections are kept"
        socks[0].close()
        wait_for(lambda: ask(server.port, LAST)[0].status == 200, "a connection is free again")
        with ExitStack() as stack:
            silent = [stack.enter_context(connect(server.port)) for _ in range(600)]
            ends = [sock.recv(4096)[:12] for sock in silent[1:]]
        assert set(ends) == {b"HTTP/1.1 503", b""}, "if too many linger, others are just closed"
        wait_for(lambda: ask(server.port, LAST)[0].status == 200, "a connection is free again")
        socks[1].close()


OPEN_FILES = [
    ((100, 1000), 500, 500),
    ((100, 1000), 2000, 1000),
    ((500, 1000), 500, None),
    ((-1, -1), 500, None),
]


@pytest.mark.parametrize(("limits", "count", "expected"), OPEN_FILES)
def test_the_limit_on_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], count: int, expected: int | None
) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits_set.append(pair))
    assert allow_files(count) == (1000 if count == 2000 else 0)
    assert limits_set == ([] if expected is None else [(expected, limits[1])])


@pytest.mark.parametrize(("missing", "connections"), [(0, 100), (30, 85), (1000, 16)])
def test_fewer_files_are_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: int, connections: int
) -> None:
    monkeypatch.setattr(http_server, "allow_files", lambda count: missing)
    limits = {"max_connections": 100, "max_connections_per_address": 90}
    settings = http_server.with_allowed_files(tiny_settings(limits), num_servers=2)
    assert settings.limits.max_connections == connections
    assert settings.limits.max_connections_per_address == min(90, connections)
    assert (f"(ulimit -n): accepting at most {connections} connections" in caplog.text) == (missing > 0)


async def test_a_body_whose_time_ends_with_its_connection_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = head(f"POST {INFER} HTTP/1.1", "Content-Length: 1000000") + bytes(100)
    async with serving(tiny_settings({"body_timeout_seconds": 1})) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(request)
        await until(lambda: app.arena.used_bytes > 0)
        writer.write_eof()
        time.sleep(1.1)
        assert await reader.read() == b""
        writer.close()
    assert "Exception" not in caplog.text
