"""ModelStreamInfer in one process: order, errors, clients that leave, shutdown."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from expertd.service.grpc.messages import CLASSES
from tests.service.apps import rows, tiny_settings
from tests.service.grpc.calls import ON, grpc_serving, held, hidden_message, output_of, refusal
from tests.service.runners import EchoRunner
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
        assert runner.entered.acquire(timeout=10)
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
        assert await asyncio.to_thread(runner.entered.acquire, True, 10)
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
