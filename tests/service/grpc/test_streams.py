"""ModelStreamInfer, and messages of all calls: their order, how many arrive, idle ones, and the end."""

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from expertd.service.grpc.arrivals import Arrivals, Arrived
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.open_calls import OpenCalls
from expertd.service.grpc.stream import StreamCall
from expertd.service.grpc.tables import SERVICE
from expertd.service.inference.errors import RequestError
from expertd.service.settings.model import Settings
from tests.service.apps import rows, tiny_settings
from tests.service.grpc import raw
from tests.service.grpc.calls import ON, Calls, grpc_serving, held, hidden_message, output_of, refusal
from tests.service.runners import EchoRunner
from tests.service.virtual_time import in_virtual_time
from tests.service.waiting import until


async def test_a_stream_is_answered_in_order() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        stream = calls.stream()
        sent = [rows(1 + index % 3, index) for index in range(20)]
        for index, values in enumerate(sent):
            await stream.write(hidden_message(values, request_id=str(index)))
            if index == 10:
                await stream.write(hidden_message(rows(1), "other", "wrong"))
        await stream.done_writing()
        answers = [answer async for answer in stream]
        wrong = answers.pop(11)
        assert wrong.error_message == "model: expected tiny, got 'other' (request id: wrong)"
        assert wrong.infer_response.id == "wrong"
        assert [answer.infer_response.id for answer in answers] == [str(index) for index in range(20)]
        for answer, values in zip(answers, sent, strict=True):
            assert not answer.error_message
            np.testing.assert_array_equal(output_of(answer.infer_response), values)


async def test_requests_of_one_stream_share_a_step_and_leave_with_it() -> None:
    runner = EchoRunner()
    async with grpc_serving(runner) as calls:
        first = await held(calls, runner)
        stream = calls.stream()
        for _ in range(3):
            await stream.write(hidden_message(rows(2)))
        await until(lambda: calls.engine.executor.waiting("tiny")[0] == 3)
        runner.gate.set()
        output_of(await first)
        for _ in range(3):
            output_of((await stream.read()).infer_response)
        assert runner.steps == [[3], [2, 2, 2]]
        assert runner.entered.acquire(timeout=60)
        first = await held(calls, runner)
        await stream.write(hidden_message(rows(2)))
        await until(lambda: calls.engine.executor.waiting("tiny")[0] == 1)
        stream.cancel()
        await until(lambda: calls.engine.executor.waiting("tiny")[0] == 0)
        runner.gate.set()
        output_of(await first)


async def test_shutdown_answers_what_was_accepted_and_ends_streams() -> None:
    runner = EchoRunner()
    async with grpc_serving(runner) as calls:
        stream = calls.stream()
        await stream.write(hidden_message(rows(1)))
        output_of((await stream.read()).infer_response)
        assert (await calls.call("ServerReady")).ready
        await runner.begun()
        first = await held(calls, runner)
        drain = asyncio.ensure_future(calls.engine.drain())
        await until(lambda: calls.engine.draining)
        assert not (await calls.call("ServerReady")).ready
        assert (await calls.call("ServerLive")).live
        text, _ = await refusal(calls.infer(hidden_message(rows(1))), grpc.StatusCode.UNAVAILABLE)
        assert text == "the server is shutting down"
        runner.gate.set()
        assert await drain
        output_of(await first)
        await calls.server.stop()
        with pytest.raises(grpc.aio.AioRpcError, match="the server is shutting down"):
            await stream.read()


async def test_the_id_of_a_message_that_is_too_large_to_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing it takes seconds, in which the event loop would do nothing else."""
    parsed: list[int] = []

    class Parser:
        @staticmethod
        def FromString(data: bytes) -> Any:  # noqa: N802
            parsed.append(len(data))
            return request.FromString(data)

    request = CLASSES["ModelInferRequest"]
    message = request(model_name="tiny", id="large")
    message.inputs.add(name="hidden_states").contents.bytes_contents.extend([b""] * 200_000)
    async with grpc_serving(EchoRunner(), tiny_settings({"max_json_bytes": 4096}, **ON)) as calls:
        stream = calls.stream()
        monkeypatch.setitem(CLASSES, "ModelInferRequest", Parser)
        await stream.write(message)
        answer = await stream.read()
        assert answer.infer_response.id == "large"
        assert "request: expected at most 4096 bytes beside raw_input_contents" in answer.error_message
        await stream.write(request(model_name="tiny", id="small"))
        assert (await stream.read()).infer_response.id == "small"
    assert parsed
    assert max(parsed) < 4096


class Sender:
    """A call whose message arrives when the test says so."""

    def __init__(self) -> None:
        self.sent: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.is_read = False

    async def messages(self) -> AsyncIterator[bytes]:
        self.is_read = True
        yield await self.sent


@in_virtual_time
async def test_others_are_not_read_until_there_is_a_place() -> None:
    arrivals = Arrivals(2, 10)
    senders = [Sender() for _ in range(5)]
    received = [asyncio.ensure_future(arrivals.message(sender.messages())) for sender in senders]
    await asyncio.sleep(0.01)
    assert [sender.is_read for sender in senders] == [True, True, False, False, False]
    for index, sender in enumerate(senders):
        sender.sent.set_result(bytes([index]))
        message = await received[index]
        assert message.take() == bytes([index])
        assert sum(sender.is_read for sender in senders) == min(2 + index, 5), "its place is taken still"
        message.free()
        message.free()
        await until(lambda: sum(sender.is_read for sender in senders) == min(3 + index, 5))  # noqa: B023


@in_virtual_time
async def test_the_slowest_gives_way_to_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertd.service.grpc.arrivals._MIN_SECONDS", 0.05)
    arrivals = Arrivals(2, 10)
    slowest, slow, new = Sender(), Sender(), Sender()
    receiving = [asyncio.ensure_future(arrivals.message(each.messages())) for each in (slowest, slow)]
    await until(lambda: slow.is_read)
    await asyncio.sleep(0.1)
    assert not any(each.done() for each in receiving), "while nobody waits, they have their time"
    new.sent.set_result(b"new")
    message = await asyncio.wait_for(arrivals.message(new.messages()), 60)
    assert message.take() == b"new"
    with pytest.raises(
        RequestError, match=r"request: expected the whole message within \d+\.\d+ s, got a part of it"
    ):
        await receiving[0]
    slow.sent.set_result(b"slow")
    assert (await receiving[1]).take() == b"slow"


@in_virtual_time
async def test_a_message_waits_for_a_place_no_longer_than_it_may_take() -> None:
    arrivals = Arrivals(1, 0.05)
    first = asyncio.ensure_future(Arrivals.message(arrivals, Sender().messages()))
    await asyncio.sleep(0.03)
    waiting = [asyncio.ensure_future(arrivals.message(Sender().messages())) for _ in range(3)]
    with pytest.raises(RequestError) as late:
        await first
    assert late.value.reason == "body_timeout"
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    texts = [
        str(error) for error in errors if isinstance(error, RequestError) and error.reason == "memory_full"
    ]
    assert texts
    assert set(texts) == {
        "request: expected at most 1 messages that arrive, by limits.max_buffered_bytes, got more"
    }


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (hidden_message(rows(65, 1)), grpc.StatusCode.INVALID_ARGUMENT),
        (hidden_message(rows(64), "none"), grpc.StatusCode.NOT_FOUND),
    ],
    ids=["too many tokens", "unknown model"],
)
async def test_refused_messages_do_not_wait_for_the_garbage_collector(
    message: Any, code: grpc.StatusCode
) -> None:
    message.raw_input_contents.append(bytes(900_000))
    data = message.SerializeToString()
    async with grpc_serving(EchoRunner()) as calls:
        await refusal(calls.call("ModelInfer", data=data), code)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(10):
                await refusal(calls.call("ModelInfer", data=data), code)
            assert tracemalloc.get_traced_memory()[0] < 3 * len(data)
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_streams_have_places_too() -> None:
    """Each may get a message of any size at any time."""
    settings = tiny_settings({"max_buffered_bytes": 5 << 20, "max_request_tokens": 16}, **ON)
    async with grpc_serving(EchoRunner(), settings) as calls:
        streams = [calls.stream() for _ in range(4)]
        for stream in streams:
            await stream.write(hidden_message(rows(1)))
            output_of((await stream.read()).infer_response)
        text, trailers = await refusal(calls.stream().read(), grpc.StatusCode.UNAVAILABLE)
        assert text == "stream: expected at most 4 open streams, by limits.max_buffered_bytes, got more"
        assert trailers["retry-after"] == "1"
        output_of(await calls.infer(hidden_message(rows(1))))
        await streams[0].done_writing()
        assert await streams[0].read() is grpc.aio.EOF
        stream = calls.stream()
        await stream.write(hidden_message(rows(1)))
        output_of((await stream.read()).infer_response)


async def one_message() -> AsyncIterator[bytes]:
    """And no end."""
    yield b"a"
    await asyncio.Event().wait()


async def at_once(message: Arrived) -> bytes:
    return message.take()


async def _answered(written: list[bytes], answer: Any, *messages: Any) -> None:
    async def given() -> AsyncIterator[bytes]:
        for message in messages:
            yield await message if asyncio.isfuture(message) else message
        await asyncio.Event().wait()

    async def write(data: bytes) -> None:
        written.append(data)

    await StreamCall(given(), answer, 0.05).run(write)


@in_virtual_time
async def test_an_idle_stream_ends_after_its_answers() -> None:
    written: list[bytes] = []

    async def slowly(message: Arrived) -> bytes:
        message.free()
        await asyncio.sleep(0.2)
        return message.take()

    began = asyncio.get_running_loop().time()
    with pytest.raises(
        RequestError, match=r"stream: expected the next request within 0.05 s, got none"
    ) as ended:
        await _answered(written, slowly, b"a", b"b")
    assert ended.value.reason == "body_timeout"
    assert written == [b"a", b"b"], "the time in which they are computed does not count"
    assert asyncio.get_running_loop().time() - began >= 0.25


@in_virtual_time
async def test_a_stream_ends_whose_answers_nobody_receives() -> None:
    async def never(data: bytes) -> None:
        await asyncio.Event().wait()

    with pytest.raises(
        RequestError, match=r"stream: expected an answer to be received within 0.05 s, got a part"
    ):
        await StreamCall(one_message(), at_once, 0.05).run(never)


async def test_a_stream_that_is_cancelled_at_once_has_begun_nothing() -> None:
    """A warning of a coroutine that nobody awaited would fail this."""

    async def write(data: bytes) -> None:
        pass

    for turns in range(6):
        running = asyncio.ensure_future(StreamCall(one_message(), at_once, 10).run(write))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    gc.collect()


async def test_a_stream_has_so_many_requests_at_a_time_and_one_that_is_not_copied() -> None:
    started: list[Arrived] = []
    is_over = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        for number in range(20):
            yield bytes([number])

    async def answer(message: Arrived) -> bytes:
        started.append(message)
        await is_over.wait()
        return message.take()

    written: list[bytes] = []

    async def write(data: bytes) -> None:
        written.append(data)

    running = asyncio.ensure_future(StreamCall(messages(), answer, 10).run(write))
    for count in (*range(1, 9), 8):
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(started) == count
        started[-1].free()
    is_over.set()
    await asyncio.wait_for(running, 60)
    assert written == [bytes([number]) for number in range(20)]


async def test_messages_that_are_parsed_in_a_thread_wait_in_the_line_for_json(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with grpc_serving(EchoRunner(), tiny_settings({"max_queue_json": 4}, **ON)) as calls:
        in_thread, goes_on = calls.server._service._infer._endpoint.threads._json, threading.Event()
        in_thread.submit(goes_on.wait, 60)
        message = hidden_message(rows(1))
        message.inputs[0].contents.bytes_contents.extend([b""] * 50_000)
        sent = [calls.infer(message) for _ in range(4)]
        await until(lambda: in_thread._work_queue.qsize() == 4)
        text, _ = await refusal(calls.infer(message), grpc.StatusCode.UNAVAILABLE)
        assert text.startswith("the line for JSON is full: 4 requests of at most 4 wait to be parsed")
        open_calls = calls.server._service._calls
        sent.pop(0).cancel()
        await until(lambda: open_calls._unsent[""] == 3)
        goes_on.set()
        for call in sent:
            await refusal(call, grpc.StatusCode.INVALID_ARGUMENT)
        left = partial(calls.serving.metric, "requests_total", model="tiny", status="499")
        await until(lambda: left() == 1)
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_an_answer_is_not_kept() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        output_of(await calls.infer(hidden_message(rows(16))))
        endpoint = calls.server._service._infer._endpoint
        await until(lambda: endpoint._last_caller() is None)


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
        assert await asyncio.wait_for(reader.readuntil(LIVE_ANSWER), 60)
        await asyncio.wait_for(calls.server.stop(), 60)
        assert calls.server.cut_off == 0


async def test_an_answer_that_is_not_read_is_cut_off_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with unread(1) as (calls, _, _):
        calls.server.finish(0.1)
        await asyncio.wait_for(calls.server.stop(), 60)
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
        await asyncio.wait_for(calls.server.stop(), 60)
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
