"""gRPC with the certificates of HTTPS: who gets through, and which certificate after a change."""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.tables import SERVICE
from expertd.service.http import certificates
from tests.service.apps import tiny_settings
from tests.service.certificates import CA, FOLDER, TLS, install
from tests.service.grpc.calls import ON, Calls, grpc_serving
from tests.service.processes import grpc_address, server_process
from tests.service.runners import EchoRunner


async def live(calls: Calls, certificate: str | None = None) -> bool:
    """ServerLive over TLS, on a new connection; False if there is none."""
    files = [FOLDER / f"{certificate}.{suffix}" for suffix in ("key", "pem")] if certificate else []
    key, chain = [file.read_bytes() for file in files] or (None, None)
    credentials = grpc.ssl_channel_credentials(CA.read_bytes(), key, chain)
    options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    address = f"127.0.0.1:{calls.server.port}"
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ServerLive")
        try:
            return bool(CLASSES["ServerLiveResponse"].FromString(await call(b"", timeout=20)).live)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


@pytest.mark.parametrize(
    ("tls", "certificate", "is_admitted"),
    [
        (TLS, None, True),
        ({**TLS, "client_ca": str(CA)}, None, False),
        ({**TLS, "client_ca": str(CA)}, "client", True),
    ],
)
async def test_who_gets_through(tls: Mapping[str, str], certificate: str | None, is_admitted: bool) -> None:
    async with grpc_serving(EchoRunner(), tiny_settings(**ON, tls=tls)) as calls:
        assert await live(calls, certificate) is is_admitted
        with pytest.raises(grpc.aio.AioRpcError):
            await calls.call("ServerLive")


@pytest.mark.slow
@pytest.mark.parametrize(("verbosity", "lines"), [(None, 0), ("INFO", 1)])
def test_connections_without_tls_are_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbosity: str | None, lines: int
) -> None:
    """gRPC's own lines have no level and are not JSON; who sets GRPC_VERBOSITY has them."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    with server_process(tiny_settings(**ON, tls=TLS), tmp_path) as server:
        with socket.create_connection(("127.0.0.1", int(grpc_address(server).rpartition(":")[2]))) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert sock.recv(1) == b""
        server.terminate()
        assert server.process.wait(30) == 0
        assert server.log().count("ssl_transport_security") == lines


async def test_a_new_certificate_is_shown_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(certificates, "monotonic", lambda: clock[0])
    install("server", tmp_path)
    tls = {"certificate": str(tmp_path / "tls.pem"), "key": str(tmp_path / "tls.key")}
    async with grpc_serving(EchoRunner(), tiny_settings(**ON, tls=tls)) as calls:
        for name in ("server", "second"):
            install(name, tmp_path)
            clock[0] += 2
            assert await live(calls)
            shown = await _shown(calls.server.port)
            assert shown.strip() == (FOLDER / f"{name}.pem").read_text().strip()


async def _shown(port: int) -> str:
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
