"""grpc.health.v1.Health, asked with the stub of its own package: what is ready, who watches, and the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from expertd.service.engine.loading import load
from expertd.service.grpc.tables import SERVICE
from tests.service.apps import MODEL, rows, tiny_settings
from tests.service.grpc import raw
from tests.service.grpc.calls import ON, Calls, grpc_serving, hidden_message, output_of, refusal
from tests.service.keys import all_keys
from tests.service.processes import grpc_address, server_process
from tests.service.runners import EchoRunner
from tests.service.waiting import until

SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.ServingStatus.Value(name)
    for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
)
CHECK, WATCH = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch"))
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def asked(service: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=service)


async def check(calls: Calls, service: str = "") -> int:
    """The status of a service."""
    return int((await health_pb2_grpc.HealthStub(calls.channel).Check(asked(service))).status)


def watch(calls: Calls, service: str = "") -> Any:
    return health_pb2_grpc.HealthStub(calls.channel).Watch(asked(service))


async def seen(watching: Any) -> int:
    """The next status."""
    return int((await asyncio.wait_for(watching.read(), 60)).status)


@asynccontextmanager
async def two_models(keys: Path | None = None) -> AsyncIterator[Calls]:
    """Real ones, which can be unloaded, with keys that nobody sends."""
    settings = tiny_settings(**ON, models=[MODEL, {**MODEL, "name": "other"}], keys=keys)
    async with grpc_serving(EchoRunner(), settings, load) as calls:
        yield calls


async def test_ready_is_what_http_says_and_needs_no_key(tmp_path: Path) -> None:
    async with two_models(all_keys(tmp_path / "keys.yaml")) as calls:
        services = ("", SERVICE, "tiny", "other")
        assert [await check(calls, each) for each in services] == [SERVING] * 4
        for unknown in ("none", "tiny/1", "a" * 1000):
            text, _ = await refusal(check(calls, unknown), grpc.StatusCode.NOT_FOUND)
            assert text.startswith("service: expected a served model, or none for all, got ")
            assert len(text) < 200
        engine = calls.engine
        await engine.repository.unload("other")
        assert [await check(calls, each) for each in services] == [SERVING, SERVING, SERVING, NOT_SERVING]
        engine.begin_drain()
        assert [await check(calls, each) for each in services] == [NOT_SERVING] * 4
        assert calls.serving.metric("key_requests_total", key="", result="unauthorized") == 0


async def test_a_watcher_sees_each_change(tmp_path: Path) -> None:
    async with two_models(all_keys(tmp_path / "keys.yaml")) as calls:
        engine = calls.engine
        server, model, none = (watch(calls, each) for each in ("", "other", "none"))
        assert [await seen(each) for each in (server, model, none)] == [SERVING, SERVING, UNKNOWN]
        await engine.repository.unload("other")
        assert await seen(model) == NOT_SERVING
        await engine.repository.load("other")
        assert await seen(model) == SERVING
        engine.begin_drain()
        assert [await seen(each) for each in (server, model)] == [NOT_SERVING] * 2
        for each in (server, model, none):
            each.cancel()
        await until(lambda: calls.server._service._health._looking is None)


async def test_the_last_change_comes_before_the_end() -> None:
    """A drain may be shorter than the time between two looks."""
    async with grpc_serving(EchoRunner()) as calls:
        watching = watch(calls)
        assert await seen(watching) == SERVING
        calls.engine.begin_drain()
        calls.server.finish(30)
        assert await seen(watching) == NOT_SERVING
        text, trailers = await refusal(watching.read(), UNAVAILABLE)
        assert (text, "retry-after" in trailers) == ("the server is shutting down", False)
        await asyncio.wait_for(calls.server.stop(), 60)
        assert calls.server.cut_off == 0


async def test_a_model_whose_steps_fail_is_tried_again() -> None:
    runner = EchoRunner(poison=0.0)
    async with grpc_serving(runner) as calls:
        watching = watch(calls, "tiny")
        assert await seen(watching) == SERVING
        for _ in range(5):
            await refusal(calls.infer(hidden_message(0 * rows(1))), grpc.StatusCode.INTERNAL)
        assert await seen(watching) == NOT_SERVING
        runner.poison = None
        assert await seen(watching) == SERVING
        assert await check(calls, "tiny") == SERVING


async def test_watchers_leave_open_calls_to_others() -> None:
    async with grpc_serving(EchoRunner(), tiny_settings({"max_connections": 6}, **ON)) as calls:
        watching = [watch(calls) for _ in range(3)]
        assert [await seen(each) for each in watching] == [SERVING] * 3
        text, trailers = await refusal(watch(calls).read(), UNAVAILABLE)
        expected = "watchers: expected at most 3, half of limits.max_connections, got one more"
        assert (text, trailers["retry-after"]) == (expected, "1")
        output_of(await calls.infer(hidden_message(rows(1))))
        watching.pop().cancel()
        await until(lambda: calls.server._service._health._num_watchers == 2)
        assert await seen(watch(calls)) == SERVING


@pytest.mark.parametrize("path", [CHECK, WATCH])
async def test_wrong_messages_are_refused(path: str) -> None:
    async with grpc_serving(EchoRunner()) as calls:
        call, codes = calls.channel.unary_unary(path), grpc.StatusCode
        text, _ = await refusal(call(b"\x0b"), codes.INVALID_ARGUMENT)
        assert text.startswith("request: expected a HealthCheckRequest, got another")
        text, _ = await refusal(call(bytes(70_000)), codes.RESOURCE_EXHAUSTED)
        assert text.startswith("body: expected at most 65536 bytes, got 70000")
        unknown = calls.channel.unary_unary(path.replace("Health/", "Health/No"))
        await refusal(unknown(b""), grpc.StatusCode.UNIMPLEMENTED)


async def test_a_probe_waits_for_no_other_message() -> None:
    """The few places for messages are taken, by callers that do not send theirs."""
    settings = tiny_settings({"max_buffered_bytes": 5 << 20, "max_request_tokens": 16}, **ON)
    async with grpc_serving(EchoRunner(), settings) as calls:
        max_messages = calls.server._service._arrivals.max_messages
        assert max_messages < 10
        slow = [calls.channel.stream_unary(f"/{SERVICE}/ModelInfer")() for _ in range(max_messages + 2)]
        await until(lambda: calls.server._service._calls._unanswered[""] == len(slow))
        assert await asyncio.wait_for(check(calls), 1) == SERVING
        assert await seen(watch(calls)) == SERVING
        for each in slow:
            each.cancel()


async def test_a_watcher_that_does_not_read_does_not_hold_up_the_end() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        _, writer = await asyncio.open_connection("127.0.0.1", calls.server.port)
        writer.write(raw.settings(initial_window_size=0) + raw.unary(1, WATCH.encode()))
        health = calls.server._service._health
        await until(lambda: health._num_watchers == 1)
        calls.engine.begin_drain()
        calls.server.finish(30)
        await asyncio.wait_for(calls.server.stop(), 60)
        assert (calls.server.cut_off, health._num_watchers) == (0, 0)
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("http_workers", [1, 2])
def test_a_server_that_is_ended(tmp_path: Path, http_workers: int) -> None:
    keys = all_keys(tmp_path / "keys.yaml")
    settings = tiny_settings(**ON, keys=keys, http_workers=http_workers, shutdown_delay_seconds=0.5)
    with (
        server_process(settings, tmp_path) as process,
        grpc.insecure_channel(grpc_address(process)) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(asked("tiny"), timeout=60)
        assert next(watching).status == SERVING
        assert stub.Check(asked(), timeout=60).status == SERVING
        process.terminate()
        assert next(watching).status == NOT_SERVING
        assert stub.Check(asked(), timeout=60).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(watching)
        assert caught.value.code() is UNAVAILABLE
        assert process.process.wait(60) == 0
        assert "Traceback" not in process.log()
