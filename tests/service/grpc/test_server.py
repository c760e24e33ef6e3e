"""Where the gRPC server listens, what it imports, how many calls it takes, and its certificates."""

import asyncio
import logging
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from expertd.service.cli import main
from expertd.service.commands.serve import check_grpc
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.server import GrpcServer
from expertd.service.grpc.tables import SERVICE
from expertd.service.http import certificates
from expertd.service.http.app import ExpertApp
from expertd.service.http.listening import BindError
from tests.paths import DEMO
from tests.service.apps import rows, tiny_settings
from tests.service.certificates import CA, FOLDER, TLS, install
from tests.service.grpc import raw
from tests.service.grpc.calls import ON, Calls, grpc_serving, hidden_message, output_of, refusal
from tests.service.keys import all_keys, key_of, write_keys
from tests.service.processes import clean_environment, grpc_address, server_process
from tests.service.runners import EchoRunner
from tests.service.sockets import free_port
from tests.service.waiting import until


@pytest.mark.parametrize(
    ("module", "package"), [("grpc", "grpcio"), ("grpc_health", "grpcio-health-checking")]
)
def test_without_its_packages_the_command_says_how_to_get_them(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    check_grpc(tiny_settings())
    with pytest.raises(
        ValueError, match=rf"^grpc.port: expected the packages of expertd\[grpc\] .*no {package}$"
    ):
        check_grpc(tiny_settings(**ON))


async def test_a_port_that_is_taken_meanwhile_is_refused() -> None:
    port = free_port()
    settings = tiny_settings(grpc={"port": port})
    server = GrpcServer(ExpertApp(settings), settings)
    text = f"^grpc.port: expected a free address, got 127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(BindError, match=text):
        await server.start()
    await server.stop()


def test_no_port_beyond_loopback_without_keys_even_if_http_has_a_socket() -> None:
    settings = tiny_settings(**ON, host="0.0.0.0", uds="/tmp/not-used")
    with pytest.raises(BindError, match=r"^host: expected a loopback address without keys, got 0\.0\.0\.0"):
        GrpcServer(ExpertApp(settings), settings)


FORK = """
import asyncio, os, time
from expertd.service.grpc.tables import SERVICE
import grpc

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"")
        except grpc.RpcError:
            pass
        if not (child := os.fork()):
            time.sleep(0.2)
            os._exit(len(os.listdir("/proc/self/task")))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    await server.stop(0)

asyncio.run(main())
"""


def test_grpc_leaves_processes_that_this_one_starts_alone() -> None:
    ignored = "ignore::DeprecationWarning"  # of Python 3.12, for a fork of several threads
    program, environment = [sys.executable, "-W", ignored, "-c", FORK], clean_environment()
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", ""), "the threads of a forked child"


@pytest.mark.parametrize(("error", "count"), [(grpc._cython.cygrpc.ExecuteBatchError, 0), (ValueError, 1)])
def test_clients_that_leave_while_they_are_answered_are_not_logged(
    error: type[Exception], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by a soak: gRPC logs a traceback for each."""
    logger = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise error
    except error:
        logger.exception("raised by servicer method")
    assert len(caplog.records) == count
    logger.error("without an exception")
    assert len(caplog.records) == count + 1


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
async def test_too_many_calls_are_refused(limit: str) -> None:
    async with grpc_serving(EchoRunner(), tiny_settings({limit: 2}, **ON)) as calls:
        streams = [calls.stream() for _ in range(2)]
        for stream in streams:
            await stream.write(hidden_message(rows(1)))
            output_of((await stream.read()).infer_response)
        text, trailers = await refusal(calls.infer(hidden_message(rows(1))), grpc.StatusCode.UNAVAILABLE)
        assert text == f"limits.{limit}: expected at most 2 open calls, got more"
        assert trailers["retry-after"] == "1"
        streams[0].cancel()
        await streams[1].done_writing()
        assert await streams[1].read() is grpc.aio.EOF
        output_of(await calls.infer(hidden_message(rows(1))))


async def test_a_key_that_is_not_ascii_is_an_unknown_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings(**ON, access_log=True, keys=all_keys(tmp_path / "keys.yaml"))
    async with grpc_serving(EchoRunner(), settings) as calls:
        for stream, name in enumerate((b"ModelInfer", b"ModelStreamInfer", b"ServerMetadata")):
            reader, writer = await asyncio.open_connection("127.0.0.1", calls.server.port)
            head = raw.call(b"/inference.GRPCInferenceService/" + name, "Bearer \u20ac".encode())
            writer.write(raw.PREFACE + raw.frame(raw.SETTINGS, 0, 0) + raw.frame(raw.HEADERS, 4, 1, head))
            assert b"grpc-status\x0216" in await asyncio.wait_for(reader.readuntil(b"grpc-message"), 60)
            assert calls.serving.metric("key_requests_total", key="", result="unauthorized") == stream + 1
            writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_message_that_does_not_arrive_is_not_waited_for() -> None:
    settings = tiny_settings({"body_timeout_seconds": 1}, **ON)
    async with grpc_serving(EchoRunner(), settings) as calls:
        slow = calls.channel.stream_unary(f"/{SERVICE}/ModelInfer")()
        text, _ = await refusal(slow, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert re.fullmatch(r"request: expected the whole message within [\d.]+ s, got a part of it", text)
        none = calls.channel.stream_unary(f"/{SERVICE}/ModelInfer")()
        await none.done_writing()
        text, _ = await refusal(none, grpc.StatusCode.INVALID_ARGUMENT)
        assert text == "request: expected a message, got none"
        await until(lambda: calls.serving.metric("requests_total", model="", status="408") == 1)


async def test_an_unexpected_error_shows_no_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any) -> bytes:
        raise RuntimeError("a secret")

    monkeypatch.setattr("expertd.service.grpc.service.answer", failing)
    async with grpc_serving(EchoRunner()) as calls:
        text, _ = await refusal(calls.call("ServerLive"), grpc.StatusCode.INTERNAL)
        assert text == "internal server error: see the server's log"


async def test_control_calls_check_their_messages() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        text, _ = await refusal(calls.call("ModelReady", data=b"\x0b"), grpc.StatusCode.INVALID_ARGUMENT)
        assert text.startswith("request: expected a ModelReadyRequest, got another message (")
        await refusal(calls.call("ModelReady", data=bytes(70_000)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        unknown = calls.channel.unary_unary(f"/{SERVICE}/TraceSetting")(b"")
        await refusal(unknown, grpc.StatusCode.UNIMPLEMENTED)
        text, _ = await refusal(calls.call("SystemSharedMemoryStatus"), grpc.StatusCode.PERMISSION_DENIED)
        assert "shared_memory.enabled" in text


async def test_the_metadata_have_the_parameters_of_tensors() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        asked = CLASSES["ModelMetadataRequest"](name="tiny")
        metadata = await calls.call("ModelMetadata", asked)
        states, ids, _ = metadata.inputs
    assert metadata.parameters["num_experts"].int64_param == 4
    assert len(metadata.parameters["weights_id"].string_param) == 64
    assert states.parameters["datatypes"].string_param == "BF16,FP16,FP32,FP8,UINT8"
    assert states.parameters["fp8_scale_columns"].int64_param == 128
    assert ids.parameters["datatypes"].string_param == "INT32,INT64"


async def test_clients_of_other_versions_are_refused() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        for version, accepted in (("0.1.0", True), ("0.2.0", False), ("0.1.1", True)):
            metadata = (("expertd-client", version),)
            for call in (
                calls.call("ServerMetadata", metadata=metadata),
                calls.infer(hidden_message(rows(1)), metadata=metadata),
            ):
                if accepted:
                    await call
                else:
                    text, _ = await refusal(call, grpc.StatusCode.INVALID_ARGUMENT)
                    assert text.startswith("expertd-client: expected version 0.1.x with expertd ")
                    assert text.endswith(", got '0.2.0'")


async def test_too_many_connections_are_closed() -> None:
    settings = tiny_settings({"max_connections": 1}, **ON)
    async with grpc_serving(EchoRunner(), settings) as calls:
        assert (await calls.call("ServerLive")).live
        reader, writer = await asyncio.open_connection("127.0.0.1", calls.server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        assert (await calls.call("ServerLive")).live


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_the_access_log_names_keys_and_statuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, log_format: str
) -> None:
    keys = write_keys(tmp_path / "keys.yaml", **{"infer": ["infer"], "-": ["infer"]})
    settings = tiny_settings(**ON, access_log=True, log_format=log_format, keys=keys)
    caplog.set_level(logging.INFO, "uvicorn.access")
    async with grpc_serving(EchoRunner(), settings) as calls:
        keyed = [(("authorization", f"Bearer {key_of(name)}"),) for name in ("infer", "-")]
        for key in keyed:
            output_of(await calls.infer(hidden_message(rows(1)), metadata=key))
        await calls.call("ServerMetadata", metadata=keyed[0])
        await refusal(calls.call("ServerMetadata"), grpc.StatusCode.UNAUTHENTICATED)
        await refusal(calls.infer(hidden_message(rows(1))), grpc.StatusCode.UNAUTHENTICATED)
        assert calls.serving.metric("key_requests_total", key="infer", result="admitted") == 2
        assert calls.serving.metric("key_requests_total", key="", result="unauthorized") == 2
        assert calls.serving.metric("requests_total", model="", status="401") == 1
    records = [record for record in caplog.records if record.name == "uvicorn.access"]
    if log_format == "text":
        assert [re.sub(r"^\S+:\d+ ", "", record.getMessage()) for record in records] == [
            'infer "gRPC ModelInfer" OK',
            '- "gRPC ModelInfer" OK',
            'infer "gRPC ServerMetadata" OK',
            '- "gRPC ServerMetadata" UNAUTHENTICATED',
            '- "gRPC ModelInfer" UNAUTHENTICATED',
        ]
        return
    found = [getattr(record, "fields", {}) for record in records]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", line.pop("client")) for line in found)
    same = {"method": "gRPC", "path": f"/{SERVICE}/ServerMetadata"}
    assert found == [{**same, "key": "infer", "status": 200}, {**same, "key": "-", "status": 401}]


def test_the_command_checks_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--config", str(DEMO), "--port", "0", "--set", f"grpc.port={port}"]
        assert main(["check", *arguments]) == 2
        assert f"grpc.port: expected a free address, got 127.0.0.1:{port}" in capsys.readouterr().out
    assert main(["check", *arguments]) == 0
    assert re.search(rf"^grpc +ok +127.0.0.1:{port} is free$", capsys.readouterr().out, re.M)


async def test_limits_beyond_those_of_grpc_mean_the_largest() -> None:
    """Found by an operator: gRPC's options have 32 bits."""
    names = ("max_body_bytes", "max_header_bytes", "max_connections", "header_timeout_seconds")
    settings = tiny_settings(dict.fromkeys(names, 2**31), **ON, keep_alive_seconds=2**31)
    async with grpc_serving(EchoRunner(), settings) as calls:
        output_of(await calls.infer(hidden_message(rows(1))))


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
@pytest.mark.parametrize(
    ("verbosity", "lines"), [(None, 0), pytest.param("INFO", 1, marks=pytest.mark.thorough)]
)
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
        assert server.process.wait(60) == 0
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
