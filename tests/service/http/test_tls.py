"""Connections with TLS, who is refused before a request, and certificates that change."""

import asyncio
import logging
import select
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from expertd.service.http import certificates, connection
from expertd.service.http.certificates import Certificates
from expertd.service.settings.certificates import TlsFiles
from expertd.service.settings.parts import TlsSettings
from tests.service.apps import (
    HIDDEN,
    Serving,
    hidden_request,
    limits_for,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.certificates import CA, FOLDER, TLS, client_context, install, load_tls
from tests.service.runners import EchoRunner
from tests.service.sockets import Answer, answers, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import until, wait_for

TOKENS = 32768
PIECE_BYTES = 16384
OUTPUT_BYTES = TOKENS * HIDDEN * 4  # 16 MiB, which no socket's buffers hold
LARGE = limits_for(TOKENS)
LIVE = head("GET /v2/health/live HTTP/1.1")
GOOD = infer(*hidden_request(rows(3)))


def secure(port: int, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    """A connection after its handshake, whose end without close_notify is an error."""
    context = context or client_context()
    return context.wrap_socket(connect(port), server_hostname="localhost", suppress_ragged_eofs=False)


def asked(sock: socket.socket, data: bytes) -> Answer:
    sock.sendall(data)
    return read_answer(sock)


def counted(server: Serving, status: int) -> float:
    return server.metric("connection_refusals_total", status=str(status))


def run(
    check: Callable[[int, Serving], Any],
    limits: dict[str, float] | None = None,
    client_ca: bool = False,
    after: Callable[[Serving], bool] = lambda server: True,
    keep_alive_seconds: int = 75,
    **listen: Any,
) -> None:
    """Call `check` in a thread with the port of a server in this process; then `after` becomes true."""
    tls = load_tls(TlsSettings.model_validate({**TLS, "client_ca": CA if client_ca else None}))

    async def main() -> None:
        settings = tiny_settings(limits, keep_alive_seconds=keep_alive_seconds)
        async with serving(settings, serving_runner(EchoRunner()), tls=tls, **listen) as server:
            await asyncio.to_thread(check, server.port, server)
            await until(lambda: after(server))
            assert server.arena.used_bytes == 0

    uvloop.run(main())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_requests_are_answered(version: ssl.TLSVersion) -> None:
    def check(port: int, server: Serving) -> None:
        context = client_context()
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2", "http/1.1"])
        with closing(secure(port, context)) as sock:
            shown = version.name.replace("v1_", "v1.")
            assert (sock.version(), sock.selected_alpn_protocol()) == (shown, "http/1.1")
            for _ in range(3):
                assert asked(sock, GOOD).status == 200
            sock.sendall(20 * LIVE + GOOD + head("GET /v2 HTTP/1.1", "Connection: close"))
            found = read_to_end(sock)
            assert [answer.status for answer in found] == [200] * 22
            assert len(found[20].body) > rows(3).nbytes

    run(check)


def test_an_idle_connection_is_closed_with_close_notify() -> None:
    def check(port: int, server: Serving) -> None:
        with closing(secure(port)) as sock:
            assert sock.recv(1) == b""

    run(check, keep_alive_seconds=1)


def test_a_large_request_and_its_answer_arrive_whole() -> None:
    values = np.random.default_rng(0).standard_normal((TOKENS, HIDDEN), dtype=np.float32)

    def check(port: int, server: Serving) -> None:
        with closing(secure(port)) as sock:
            for _ in range(2):
                answer = asked(sock, infer(*hidden_request(values)))
                assert answer.status == 200
                assert answer.body.endswith(values.tobytes())

    run(check, LARGE)


def test_the_last_answer_arrives_whole_before_much_unread_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LINGER_SECONDS", 300.0)  # this client may be slow to read what was sent

    def check(port: int, server: Serving) -> None:
        request = infer(*hidden_request(np.ones((TOKENS, HIDDEN), np.float32)), "Connection: close")
        with closing(secure(port)) as sock:
            (answer,) = answers(send_and_read(sock, request + bytes(5_000_000)))
        assert answer.status == 200
        assert len(answer.body) > OUTPUT_BYTES

    run(check, LARGE)


def send_and_read(sock: ssl.SSLSocket, data: bytes) -> bytes:
    """What the server sends until it closes; in one thread: OpenSSL's connections are not for two."""
    sock.setblocking(False)
    unsent, received, ended = memoryview(data), bytearray(), False
    while not ended:
        assert any(select.select([sock], [sock] if unsent else [], [], 60)), "nothing happens for 60 s"
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            unsent = unsent[sock.send(unsent[:PIECE_BYTES]) :] if unsent else unsent
        with suppress(ssl.SSLWantReadError):
            piece = sock.recv(PIECE_BYTES)
            received += piece
            ended = not piece
            if len(received) >> 17 != (len(received) - len(piece)) >> 17:
                time.sleep(1e-3)  # so that the system still holds a part when the server has sent all
    return bytes(received)


def test_a_client_that_stops_reading_is_cut_off() -> None:
    def check(port: int, server: Serving) -> None:
        request = infer(*hidden_request(np.ones((TOKENS, HIDDEN), np.float32)))  # before the connection idles
        with closing(secure(port)) as sock:
            sock.sendall(request)
            wait_for(lambda: server.counted(499), "it is cut off")

    run(check, LARGE, keep_alive_seconds=1)


def test_what_is_not_tls_is_refused() -> None:
    def check(port: int, server: Serving) -> None:
        with closing(connect(port)) as sock:
            sock.sendall(LIVE)
            (answer,) = read_to_end(sock)
            text = "request: expected TLS (https://), got HTTP without it"
            assert (answer.status, answer.error) == (400, text)
        with closing(connect(port)) as sock:
            sock.sendall(bytes(range(256)))
            while sock.recv(100):
                pass

    run(check, after=lambda server: counted(server, 400) == 2)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
def test_older_versions_are_refused() -> None:
    def check(port: int, server: Serving) -> None:
        context = client_context()
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            secure(port, context)

    run(check, after=lambda server: counted(server, 400) == 1)


def test_with_a_client_ca_only_its_certificates_are_admitted() -> None:
    def check(port: int, server: Serving) -> None:
        with closing(secure(port, client_context("client"))) as sock:
            assert asked(sock, GOOD).status == 200
        with (
            pytest.raises(OSError, match=r"(?i)certificate.required|reset|broken"),
            closing(secure(port)) as sock,
        ):
            asked(sock, GOOD)

    run(check, client_ca=True, after=lambda server: counted(server, 400) == 1)


def test_a_handshake_that_does_not_end_is_cut_off() -> None:
    def check(port: int, server: Serving) -> None:
        with closing(connect(port)) as silent, closing(connect(port)) as partial:
            with suppress(ConnectionError):  # it may be late already
                partial.sendall(b"\x16\x03\x01")
            for sock in (silent, partial):
                with suppress(ConnectionResetError):
                    assert sock.recv(1) == b""

    run(check, {"header_timeout_seconds": 0.2}, after=lambda server: counted(server, 408) == 2)


def test_too_many_connections_are_closed_without_a_handshake() -> None:
    def check(port: int, server: Serving) -> None:
        with closing(connect(port)), closing(secure(port)) as sock:
            with pytest.raises(OSError, match=r"(?i)eof|reset|broken"):
                secure(port)
            assert asked(sock, LIVE).status == 200

    limits: dict[str, float] = {"max_connections_per_address": 2, "header_timeout_seconds": 30}
    run(check, limits, after=lambda server: counted(server, 503) == 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only a test moves on."""
    time = [100.0]
    monkeypatch.setattr(certificates, "monotonic", lambda: time[0])
    return time


@pytest.fixture
def settings(tmp_path: Path) -> TlsSettings:
    install("server", tmp_path)
    return TlsSettings(certificate=tmp_path / "tls.pem", key=tmp_path / "tls.key")


def looked(found: Certificates, clock: list[float]) -> TlsFiles:
    """The files after a second."""
    clock[0] += 1
    found.refresh()
    return found.files


def test_changed_files_are_read_again(
    tmp_path: Path, settings: TlsSettings, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    found = Certificates(settings)
    first, context = found.files, found.context
    assert looked(found, clock) is first
    assert found.context is context
    (tmp_path / "tls.pem").write_bytes((FOLDER / "second.pem").read_bytes())
    assert looked(found, clock) is first, "files may be replaced one after the other"
    install("second", tmp_path)
    found.refresh()
    assert found.files is first, "looked at within the last second"
    assert looked(found, clock).certificate == (FOLDER / "second.pem").read_text()
    second = found.context
    assert second is not context
    (tmp_path / "tls.pem").touch()
    looked(found, clock)
    assert found.context is second, "the same files"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_wrong_files_are_reported_once_and_not_used(
    tmp_path: Path, settings: TlsSettings, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    found = Certificates(settings)
    before, context = found.files, found.context
    (tmp_path / "tls.key").write_text("nothing")
    for _ in range(4):
        assert looked(found, clock) is before
    (tmp_path / "tls.pem").unlink()
    for _ in range(4):
        assert looked(found, clock) is before
    assert found.context is context
    remains = "; the certificate that was read before remains in use"
    assert [record.getMessage() for record in caplog.records] == [
        f"tls.key: {tmp_path}/tls.key: expected a private key in PEM, got something else{remains}",
        f"tls.certificate: {tmp_path}/tls.pem: cannot be read: No such file or directory{remains}",
    ]
    install("second", tmp_path)
    assert looked(found, clock) is not before


def test_a_process_begins_with_what_another_one_has(
    tmp_path: Path, settings: TlsSettings, clock: list[float]
) -> None:
    known = Certificates(settings).files
    (tmp_path / "tls.key").unlink()
    found = Certificates(settings, known)
    assert looked(found, clock) == known
    install("second", tmp_path)
    assert looked(found, clock) != known
