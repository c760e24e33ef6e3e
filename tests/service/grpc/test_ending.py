"""The end of the server while answers wait for their clients, and messages for their senders."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from expertd.service.grpc.open_calls import OpenCalls
from expertd.service.grpc.tables import SERVICE
from expertd.service.settings.model import Settings
from tests.service.apps import rows, tiny_settings
from tests.service.grpc import raw
from tests.service.grpc.calls import ON, Calls, grpc_serving, hidden_message, output_of, refusal
from tests.service.runners import EchoRunner
from tests.service.waiting import until

LIVE = f"/{SERVICE}/ServerLive".encode()
LIVE_ANSWER = b"\x00\x00\x00\x00\x02\x08\x01"


def unsent(calls: Calls) -> int:
    """The calls whose answers are not sent."""
    return calls.server._service._calls._unsent[""]


def are_answered(calls: Calls, count: int) -> bool:
    """Whether `count` calls wait for their client to read the answer, and no other is open."""
    return unsent(calls) == count and not calls.server._service._calls._unanswered


@asynccontextmanager
async def unread(
    count: int, settings: Settings | None = None
) -> AsyncIterator[tuple[Calls, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A server that has answered `count` calls of a client that reads no answer."""
    async with grpc_serving(EchoRunner(), settings) as calls:
        reader, writer = await asyncio.open_connection("127.0.0.1", calls.server.port)
        try:
            writer.write(raw.settings(initial_window_size=0))
            for index in range(count):  # one at a time: the limit is on open calls
                writer.write(raw.unary(1 + 2 * index, LIVE))
                await until(partial(are_answered, calls, index + 1))
            yield calls, reader, writer
        finally:
            writer.close()


async def test_an_answer_that_waits_for_its_client_has_the_time_of_the_drain() -> None:
    async with unread(1) as (calls, reader, writer):
        calls.server.finish(30)
        await asyncio.sleep(1.5)
        writer.write(raw.window_update(1, 1000))
        assert await asyncio.wait_for(reader.readuntil(LIVE_ANSWER), 10)
        await asyncio.wait_for(calls.server.stop(), 10)
        assert calls.server.cut_off == 0


async def test_an_answer_that_is_not_read_is_cut_off_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with unread(1) as (calls, _, _):
        calls.server.finish(0.1)
        await asyncio.wait_for(calls.server.stop(), 10)
        assert calls.server.cut_off == 1
    assert "gRPC: calls whose answers were not sent or read, ended now: 1" in caplog.messages


async def test_answers_that_are_not_read_count_as_open() -> None:
    async with unread(2, tiny_settings({"max_connections_per_address": 1}, **ON)) as (calls, _, writer):
        text, _ = await refusal(calls.call("ServerLive"), grpc.StatusCode.UNAVAILABLE)
        limit = "expected at most 2, twice limits.max_connections_per_address, got more"
        assert text == f"open calls and unread answers: {limit}"
        writer.write(raw.window_update(1, 1000))
        await until(lambda: unsent(calls) == 1)
        assert (await calls.call("ServerLive")).live


async def test_messages_that_have_not_arrived_are_refused() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        slow = calls.channel.stream_unary(f"/{SERVICE}/ModelInfer")()
        await until(lambda: unsent(calls) == 1)
        calls.server.finish(30)
        text, trailers = await refusal(slow, grpc.StatusCode.UNAVAILABLE)
        assert "retry-after" not in trailers
        assert text == "the server is shutting down, and the message had not arrived"
        await asyncio.wait_for(calls.server.stop(), 10)
        assert calls.server.cut_off == 0


async def test_a_call_that_comes_as_the_last_one_ends_is_waited_for() -> None:
    class Context:
        def __init__(self) -> None:
            self.done: list[Callable[[object], None]] = []

        def peer(self) -> str:
            return "ipv4:127.0.0.1:80"

        def add_done_callback(self, done: Callable[[object], None]) -> None:
            self.done.append(done)

    calls, (first, second) = OpenCalls(tiny_settings().limits), (Context(), Context())
    with calls.one(first):
        pass
    ended = asyncio.ensure_future(calls.sent(30))
    await asyncio.sleep(0)
    first.done[0](first)
    with calls.one(second):
        pass
    await asyncio.sleep(0.01)
    assert not ended.done()
    second.done[0](second)
    assert await ended == 0


async def test_a_stream_that_opens_as_the_server_ends_is_refused() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        assert await calls.server._service.end(0) == 0
        text, trailers = await refusal(calls.stream().read(), grpc.StatusCode.UNAVAILABLE)
        assert "retry-after" not in trailers
        assert text == "the server is shutting down"


async def test_a_stream_that_its_client_has_ended_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async with grpc_serving(EchoRunner()) as calls:
        service, is_over = calls.server._service, asyncio.Event()
        part = service._part

        async def held(*arguments: Any) -> bytes:
            answer = await part(*arguments)
            await is_over.wait()
            return answer

        monkeypatch.setattr(service, "_part", held)
        stream = calls.stream()
        await stream.write(hidden_message(rows(1)))
        await stream.done_writing()
        await until(lambda: any(each._reading.done() for each in service._streams))
        calls.server.finish(30)
        is_over.set()
        output_of((await stream.read()).infer_response)
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
