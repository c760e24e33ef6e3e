"""https: whom a client trusts, what it shows of itself, and calls over it."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from expertd_client import (
    AsyncExpertClient,
    ExpertClient,
    InvalidRequestError,
    ServerUnreachableError,
    UnknownModelError,
)
from expertd_client.address import parse_address
from tests.callers import Connect
from tests.expertd import HIDDEN, MODEL, RunningServer, running_server
from tests.fakes import fake_server

FOLDER = Path(__file__).parents[2] / "tests/certificates"
CA = FOLDER / "ca.pem"
CERTIFICATE = (FOLDER / "client.pem", FOLDER / "client.key")
ROWS = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTD_CA", raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that asks clients for certificates."""
    tls = (f"tls.certificate={FOLDER}/server.pem", f"tls.key={FOLDER}/server.key", f"tls.client_ca={CA}")
    with running_server(tmp_path_factory.mktemp("tls"), *tls) as running:
        yield running


@contextmanager
def secure_server(body: int, address: str = "127.0.0.1") -> Iterator[str]:
    """A server with TLS that reads `body` bytes, and knows no model; it has the name 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FOLDER / "server.pem", FOLDER / "server.key")
    context.num_tickets = 8  # messages of TLS, after the handshake
    with socket.create_server((address, 0)) as listener:

        def serve() -> None:
            with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as sock:
                received = 0
                while received < body:
                    received += len(sock.recv(1 << 16))
                sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://{address}:{listener.getsockname()[1]}"
        thread.join(60)


def test_calls_over_https(connect: Connect, server: RunningServer) -> None:
    caller = connect(server.url, ca=CA, certificate=CERTIFICATE)
    assert caller.ready()
    first = caller.infer(MODEL, ROWS)
    assert first.shape == ROWS.shape
    many = np.tile(ROWS, (700, 1))  # 4 MiB, which no socket takes at once
    outputs = [caller.infer(MODEL, many) for _ in range(2)]
    for output in outputs:
        np.testing.assert_allclose(output[:3], first, rtol=2e-2, atol=2e-2)


def test_one_file_may_have_certificate_and_key(server: RunningServer, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text("".join(file.read_text() for file in CERTIFICATE))
    with ExpertClient(server.url, ca=str(CA), certificate=str(both)) as client:
        assert client.server().name == "expertd"


def test_the_ca_may_be_in_the_environment(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_CA", str(CA))
    with ExpertClient(server.url, certificate=CERTIFICATE) as client:
        assert client.live()


def test_other_servers_and_other_names_are_not_trusted(connect: Connect) -> None:
    for address, ca in (("127.0.0.1", None), ("127.0.0.2", CA)):
        with secure_server(0, address) as url:
            caller = connect(url, ca=ca)
            with pytest.raises(ServerUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
                caller.server()


def test_without_a_certificate_a_server_that_wants_one_refuses(
    connect: Connect, server: RunningServer
) -> None:
    with pytest.raises(ServerUnreachableError):
        connect(server.url, ca=CA).server()


def test_a_server_without_tls_is_named(connect: Connect) -> None:
    with fake_server(lambda peer: peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as plain:
        caller = connect(plain.url.replace("http:", "https:"), ca=CA)
        with pytest.raises(ServerUnreachableError, match="expected a connection, got"):
            caller.server()


def test_messages_of_tls_are_not_taken_for_an_answer(connect: Connect) -> None:
    rows = np.zeros((1 << 14, HIDDEN), np.float32)  # 32 MiB: sending has to wait
    with secure_server(rows.nbytes) as url, pytest.raises(UnknownModelError):
        connect(url, ca=CA, timeout=10.0, transport="http").infer("m", rows)


@pytest.mark.parametrize("client", [ExpertClient, AsyncExpertClient])
def test_files_that_cannot_be_used(
    client: type[ExpertClient] | type[AsyncExpertClient], tmp_path: Path
) -> None:
    url, empty = "https://localhost", tmp_path / "empty.pem"
    empty.touch()
    for ca in (tmp_path / "none.pem", empty):
        with pytest.raises(InvalidRequestError, match=r"^ca: expected a file of certificates in PEM, got "):
            client(url, ca=ca)
    for certificate in (tmp_path / "none.pem", CA, (CERTIFICATE[0], FOLDER / "server.key")):
        with pytest.raises(InvalidRequestError, match=r"^certificate: expected a file in PEM with a cert"):
            client(url, ca=CA, certificate=certificate)
    for other in ("http://localhost", "unix:/run/e.sock"):
        with pytest.raises(InvalidRequestError, match=r"^url: expected https://host:port with ca or cert"):
            client(other, ca=CA)


def test_addresses() -> None:
    assert parse_address("https://experts").authority == "experts"
    assert parse_address("https://experts").port == 443
    assert parse_address("https://experts:80").authority == "experts:80"
    assert parse_address("https://localhost:8443").is_local
    context = parse_address("https://experts").tls
    assert context is not None
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
