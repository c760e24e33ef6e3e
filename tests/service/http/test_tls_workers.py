"""HTTPS of a server in processes of its own: its certificate is replaced while it runs."""

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.service.apps import hidden_request, rows
from tests.service.certificates import FOLDER, client_context, install, serial_of
from tests.service.http.processes import two_processes, workers_of
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import connect, infer, read_answer
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # seconds pass until files are looked at

GOOD = infer(*hidden_request(rows(3)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("server")
    install("server", made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    tls = {"certificate": str(folder / "tls.pem"), "key": str(folder / "tls.key")}
    with server_process(two_processes(tls=tls), folder) as process:
        yield process
        assert "Traceback" not in process.log()


def secure(server: ServerProcess) -> ssl.SSLSocket:
    """A connection whose first request is answered."""
    sock = client_context().wrap_socket(connect(server.port), server_hostname="localhost")
    assert is_answered(sock)
    return sock


def is_answered(sock: ssl.SSLSocket) -> bool:
    sock.sendall(GOOD)
    return read_answer(sock).status == 200


def serials(server: ServerProcess) -> set[str]:
    """Of the certificates that new connections are shown, by either process."""
    socks = [secure(server) for _ in range(4)]
    found = {serial_of(sock) for sock in socks}
    for sock in socks:
        sock.close()
    return found


def test_the_certificate_is_replaced_without_touching_connections(
    server: ServerProcess, folder: Path
) -> None:
    assert f"listening on https://127.0.0.1:{server.port}" in server.log()
    with closing(secure(server)) as before:
        (first,) = serials(server)
        assert first == serial_of(before)
        install("second", folder)
        wait_for(lambda: first not in serials(server), "new connections have the new certificate")
        (second,) = serials(server)

        (folder / "tls.pem").write_bytes((FOLDER / "server.pem").read_bytes())  # not of this key
        wait_for(lambda: server.log().count("remains in use") >= 3, "each process says so")
        os.kill(workers_of(server)[0], signal.SIGKILL)
        wait_for(lambda: "starting another" in server.log(), "a process is replaced")
        wait_for(lambda: len(workers_of(server)) == 2, "it is")
        assert serials(server) == {second}
        assert server.log().count("expected the key of") <= 4, "not every second"
        install("second", folder)


def test_it_drains(server: ServerProcess) -> None:
    with closing(secure(server)) as idle:
        server.terminate()
        assert idle.recv(1) == b""
    assert server.process.wait(30) == 0
