"""Headers for browsers: of every response, whoever makes it, and each once."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.service.apps import hidden_request, rows
from tests.service.http.processes import two_processes
from tests.service.processes import ServerProcess, server_process
from tests.service.sockets import connect, head, infer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(two_processes(), tmp_path_factory.mktemp("server")) as process:
        yield process


def head_of(sock: socket.socket) -> list[str]:
    """The lines of a response whose connection ends."""
    data = b""
    while received := sock.recv(1 << 20):
        data += received
    return data.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")[1:]


@pytest.mark.parametrize(
    "data",
    [
        head("GET /v2 HTTP/1.1", "Connection: close"),
        head("GET /docs HTTP/1.1", "Connection: close"),
        head("GET /none HTTP/1.1", "Connection: close"),
        infer(*hidden_request(rows(1)), "Connection: close"),
        b"no request\r\n\r\n",
    ],
    ids=["passed on", "page", "none", "infer", "refused"],
)
def test_every_response_has_them_once(server: ServerProcess, data: bytes) -> None:
    with closing(connect(server.port)) as sock:
        sock.sendall(data)
        lines = head_of(sock)
    for expected in ("x-content-type-options: nosniff", "cache-control: no-store"):
        name = expected.partition(":")[0]
        assert [line for line in lines if line.startswith(f"{name}:")] == [expected]
    policies = [line for line in lines if line.startswith("content-security-policy: ")]
    assert len(policies) == (b"/docs" in data)
    assert all("frame-ancestors 'none'" in policy for policy in policies)
