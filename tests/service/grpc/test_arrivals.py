"""How many messages arrive at a time, which of them give way, and what becomes of idle streams."""

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from expertd.service.grpc.arrivals import Arrivals, Arrived
from expertd.service.grpc.stream import StreamCall
from expertd.service.inference.errors import RequestError
from tests.service.apps import rows, tiny_settings
from tests.service.grpc.calls import ON, grpc_serving, hidden_message, output_of, refusal
from tests.service.runners import EchoRunner
from tests.service.virtual_time import in_virtual_time
from tests.service.waiting import until


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
    message = await asyncio.wait_for(arrivals.message(new.messages()), 5)
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
    await asyncio.wait_for(running, 10)
    assert written == [bytes([number]) for number in range(20)]


async def test_messages_that_are_parsed_in_a_thread_wait_in_the_line_for_json(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with grpc_serving(EchoRunner(), tiny_settings({"max_queue_json": 4}, **ON)) as calls:
        in_thread, goes_on = calls.server._service._infer._endpoint.threads._json, threading.Event()
        in_thread.submit(goes_on.wait, 30)
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
