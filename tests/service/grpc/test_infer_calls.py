"""ModelInfer in one process: tensors, refusals, limits, deadlines, clients that leave."""

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest

from expertd.service.engine.steps import Submission
from expertd.service.grpc.arrivals import Arrived
from expertd.service.grpc.infer import _RpcCaller
from expertd.service.grpc.infer_request import MessageHead
from expertd.service.grpc.messages import CLASSES
from expertd.service.inference.call import InferCall
from expertd.service.inference.plan import RequestPlan
from tests.service.apps import HIDDEN, NUM_EXPERTS, TOP_K, rows, tiny_settings
from tests.service.grpc.calls import ON, grpc_serving, held, hidden_message, output_of, refusal
from tests.service.runners import EchoRunner
from tests.service.waiting import until

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def changed(**changes: Any) -> Any:
    """A good request whose first input has these changes."""
    message = hidden_message(rows(2))
    for name, value in changes.items():
        if name == "shape":
            del message.inputs[0].shape[:]
            message.inputs[0].shape.extend(value)
        elif name == "raw":
            del message.raw_input_contents[:]
            message.raw_input_contents.extend(value)
        elif name == "parameter":
            message.inputs[0].parameters[value].int64_param = 8
        else:
            setattr(message.inputs[0], name, value)
    return message


async def test_outputs_and_typed_contents() -> None:
    values = rows(3)
    async with grpc_serving(EchoRunner()) as calls:
        response = await calls.infer(hidden_message(values, request_id="a-1"))
        assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "a-1")
        np.testing.assert_array_equal(output_of(response), values)
        typed = changed(raw=[], shape=[3, HIDDEN])
        typed.inputs[0].contents.fp32_contents.extend(values.ravel().tolist())
        ids = typed.inputs.add(name="topk_ids", datatype="INT64", shape=[3, TOP_K])
        ids.contents.int64_contents.extend([0, 1] * 3)
        weights = typed.inputs.add(name="topk_weights", datatype="FP32", shape=[3, TOP_K])
        weights.contents.fp32_contents.extend([0.5] * 6)
        np.testing.assert_array_equal(output_of(await calls.infer(typed)), values)
        # KServe's client sends the size of each raw tensor, as over HTTP.
        as_http = hidden_message(values)
        as_http.inputs[0].parameters["binary_data_size"].int64_param = values.nbytes
        as_http.parameters["binary_data_output"].bool_param = True
        as_http.outputs.add(name="hidden_states").parameters["binary_data"].bool_param = True
        np.testing.assert_array_equal(output_of(await calls.infer(as_http)), values)
        empty = hidden_message(rows(0))
        assert output_of(await calls.infer(empty)).shape == (0, HIDDEN)
        assert calls.serving.metric("requests_total", model="tiny", status="200") == 4


async def test_what_is_empty_is_absent() -> None:
    """A parameter without a choice is what null is over HTTP; so are contents without values."""
    values, message = rows(2), hidden_message(rows(2))
    output = message.outputs.add(name="hidden_states")
    for owner in (message, message.inputs[0], output):
        for name in (
            *("timeout", "priority", "binary_data", "binary_data_output", "binary_data_size", "datatype"),
            *("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "sequence_id"),
        ):
            owner.parameters[name].SetInParent()
    message.inputs[0].contents.SetInParent()
    load = CLASSES["RepositoryModelLoadRequest"](model_name="tiny")
    load.parameters["config"].SetInParent()
    region = hidden_message(rows(2))
    region.inputs[0].contents.SetInParent()
    region.inputs[0].parameters["shared_memory_region"].string_param = "none"
    region.inputs[0].parameters["shared_memory_byte_size"].int64_param = values.nbytes
    del region.raw_input_contents[:]
    async with grpc_serving(EchoRunner()) as calls:
        np.testing.assert_array_equal(output_of(await calls.infer(message)), values)
        of_lanes = refusal(calls.call("RepositoryModelLoad", load), grpc.StatusCode.FAILED_PRECONDITION)
        assert (await of_lanes)[0].startswith("repository: "), "no parameter is refused"
        text, _ = await refusal(calls.infer(region), INVALID)
        assert text.startswith(
            "parameter shared_memory_region of input hidden_states: expected none, got 'none'"
        )
        output.parameters["binary_data"].bool_param = False
        text, _ = await refusal(calls.infer(message), INVALID)
        assert text.startswith("parameter binary_data of output 'hidden_states': expected true or none")


async def test_large_tensors_pass_through_the_arena() -> None:
    values = rows(64 * 4)  # more than 64 KiB
    settings = tiny_settings({"max_request_tokens": 256}, **ON)
    async with grpc_serving(EchoRunner(), settings) as calls:
        for seed in range(3):
            values = rows(256, seed)
            np.testing.assert_array_equal(output_of(await calls.infer(hidden_message(values))), values)
        assert calls.engine.arena is not None
        assert calls.engine.arena.used_bytes == 0


WRONG = [
    (hidden_message(rows(65)), "request: expected at most 64 tokens, got 65"),
    (
        changed(name="input"),
        "name of an input: expected hidden_states, hidden_states_scale, topk_ids or topk_weights",
    ),
    (changed(datatype="INT8"), "datatype of input hidden_states: expected BF16, FP16, FP32, FP8 or UINT8"),
    (changed(shape=[2, 5]), "shape of input hidden_states: expected [2, 128], got [2, 5]"),
    (changed(shape=[3, HIDDEN]), "raw_input_contents of input hidden_states: expected 1536 bytes"),
    (changed(shape=[2]), "shape of input hidden_states: expected two sizes"),
    (changed(shape=[-1, HIDDEN]), "shape of input hidden_states: expected two sizes"),
    (changed(raw=[b"", b""]), "raw_input_contents: expected 1, one for each input with data, got 2"),
    (changed(raw=[]), "contents of input hidden_states: expected 1024 bytes for shape [2, 128]"),
    (changed(raw=[], datatype="BF16"), "input hidden_states: expected raw_input_contents for BF16"),
    (changed(parameter="binary_data_size"), "parameter binary_data_size of input hidden_states: expected"),
    (changed(raw=[], parameter="binary_data_size"), "input hidden_states: expected raw_input_contents"),
    (changed(parameter="binary_data"), "parameter binary_data of input hidden_states: expected true or none"),
    (changed(parameter="timeout"), "parameter timeout of input hidden_states: expected it at"),
    (hidden_message(rows(1), priority=256), "parameter priority: expected an integer from 0 to 255"),
    (CLASSES["ModelInferRequest"](model_name="tiny"), "inputs: expected hidden_states, got none"),
]


async def test_wrong_requests_are_refused() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        for number, (message, text) in enumerate(WRONG, 1):
            message.id = "7"
            got, _ = await refusal(calls.infer(message), INVALID)
            assert got.startswith(text)
            assert got.endswith(" (request id: 7)")
            assert calls.serving.metric("requests_total", model="tiny", status="400") == number
        for data in (b"\x3a\x05abc", b"\x0a\x01\xff", b"\x0b"):
            text, _ = await refusal(calls.call("ModelInfer", data=data), INVALID)
            assert text.startswith("request: expected a ModelInferRequest, got another message (")
        text, _ = await refusal(calls.infer(hidden_message(rows(1), "other")), grpc.StatusCode.NOT_FOUND)
        assert text == "model: expected tiny, got 'other'"
        assert calls.serving.metric("requests_total", model="", status="404") == 1
        output_of(await calls.infer(hidden_message(rows(1))))


async def test_routing_is_validated_and_mixed_contents_are_refused() -> None:
    async with grpc_serving(EchoRunner()) as calls:
        message = hidden_message(rows(1))
        message.inputs.add(name="topk_ids", datatype="INT32", shape=[1, TOP_K])
        message.inputs.add(name="topk_weights", datatype="FP32", shape=[1, TOP_K])
        message.raw_input_contents.append(np.array([0, NUM_EXPERTS], np.int32).tobytes())
        message.raw_input_contents.append(np.ones(TOP_K, np.float32).tobytes())
        assert "topk_ids" in (await refusal(calls.infer(message), INVALID))[0]
        message.inputs[0].contents.fp32_contents.append(1.0)
        text, _ = await refusal(calls.infer(message), INVALID)
        assert text == "input hidden_states: expected contents or raw_input_contents, got both"
        del message.raw_input_contents[:]
        message.inputs[0].contents.int64_contents.append(1)
        message.inputs[0].contents.bool_contents.append(True)  # before fp32_contents in the message
        text, _ = await refusal(calls.infer(message), INVALID)
        got = "bool_contents, int64_contents"
        assert text == f"contents of input hidden_states: expected only fp32_contents for FP32, got {got}"


async def test_sizes_beyond_the_limits_are_refused() -> None:
    settings = tiny_settings({"max_json_bytes": 4096, "max_body_bytes": 40_000}, **ON)
    async with grpc_serving(EchoRunner(), settings) as calls:
        many = changed(raw=[], shape=[16, HIDDEN])
        many.inputs[0].contents.fp32_contents.extend([1.0] * 16 * HIDDEN)
        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        text, _ = await refusal(calls.infer(many), exhausted)
        assert text.startswith("request: expected at most 4096 bytes beside raw_input_contents, got ")
        text, _ = await refusal(calls.infer(hidden_message(rows(80))), exhausted)
        assert text.startswith("body: expected at most 40000 bytes, got at least ")
        await refusal(calls.infer(hidden_message(rows(400))), exhausted)
        bomb = calls.infer(changed(raw=[bytes(1 << 24)]), compression=grpc.Compression.Gzip)
        await refusal(bomb, exhausted)
        output_of(await calls.infer(hidden_message(rows(1)), compression=grpc.Compression.Gzip))


async def test_a_full_queue_says_when_to_try_again() -> None:
    runner = EchoRunner()
    async with grpc_serving(runner, tiny_settings({"max_queue_requests": 1}, **ON)) as calls:
        first = await held(calls, runner)
        second = calls.infer(hidden_message(rows(3)))
        await until(lambda: calls.engine.executor.waiting("tiny")[0] == 1)
        text, trailers = await refusal(calls.infer(hidden_message(rows(3))), grpc.StatusCode.UNAVAILABLE)
        assert "the queue of model tiny is full" in text
        assert int(trailers["retry-after"]) >= 1
        assert int(trailers["grpc-retry-pushback-ms"]) == 1000 * int(trailers["retry-after"])
        runner.gate.set()
        for each in (first, second):
            output_of(await each)


async def test_a_timeout_begins_when_the_message_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, parse = EchoRunner(), MessageHead.parse

    def slowly(head: MessageHead, *arguments: Any) -> RequestPlan:
        time.sleep(0.05)
        return parse(head, *arguments)

    async with grpc_serving(runner) as calls:
        monkeypatch.setattr(MessageHead, "parse", slowly)
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        text, _ = await refusal(calls.infer(hidden_message(rows(1), timeout=50_000)), late)
        assert text == "the request's timeout of 50000 microseconds expired before it was queued"
    assert runner.steps == []


async def test_a_timeout_and_a_deadline_pass_in_the_queue() -> None:
    runner = EchoRunner()
    async with grpc_serving(runner) as calls:
        first = await held(calls, runner)
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        text, _ = await refusal(calls.infer(hidden_message(rows(1), timeout=500_000)), late)
        assert text == "the request's timeout of 500000 microseconds expired in the queue"
        await refusal(calls.infer(hidden_message(rows(1)), timeout=0.5), late)
        await refusal(calls.infer(hidden_message(rows(1), timeout=10_000_000), timeout=0.5), late)

        def refused(reason: str) -> float:
            return calls.serving.metric("refusals_total", model="tiny", reason=reason)

        # A client ends its call at the deadline, too, which may arrive first.
        await until(lambda: refused("queue_timeout") + refused("client_gone") == 3)
        assert refused("queue_timeout") >= 1
        runner.gate.set()
        output_of(await first)
    assert runner.steps == [[3]], "none of them was computed"


LEFT = [(None, None, 0, 0), (None, 20, 19, 20), (29, None, 10, 30), (29, 600, 10, 30), (600, 20, 19, 20)]


@pytest.mark.parametrize(("deadline", "timeout", "least", "most"), LEFT)
async def test_the_executor_knows_what_is_left_of_a_deadline(
    deadline: float | None, timeout: int | None, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float | None] = []
    message = hidden_message(rows(1), timeout=1_000_000 * (timeout or 0))
    async with grpc_serving(EchoRunner()) as calls:
        submit = calls.engine.submit

        def noted(submission: Submission) -> Submission:
            given.append(submission.timeout)
            return submit(submission)

        monkeypatch.setattr(calls.engine, "submit", noted)
        output_of(await calls.infer(message, timeout=deadline))
        stream = calls.stream(timeout=deadline)
        await stream.write(message)
        assert not (await stream.read()).error_message
        await stream.done_writing()
    assert len(given) == 2
    for left in given:
        assert (left is None) == (deadline is None and timeout is None)
        assert left is None or least < left <= most


async def test_a_client_that_leaves_is_not_computed() -> None:
    runner = EchoRunner()
    async with grpc_serving(runner) as calls:
        first = await held(calls, runner)
        left = calls.infer(hidden_message(rows(5)))
        await until(lambda: calls.engine.executor.waiting("tiny")[0] == 1)
        left.cancel()
        name = {"model": "tiny", "reason": "client_gone"}
        await until(lambda: calls.serving.metric("refusals_total", **name) == 1)
        runner.gate.set()
        output_of(await first)
    assert runner.steps == [[3]]


async def test_refusals_of_models_name_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = tiny_settings(**ON, access_log=True, log_format="json")
    async with grpc_serving(EchoRunner(), settings) as calls:
        message = hidden_message(rows(1), "nobody", request_id="a-1")
        text, _ = await refusal(calls.infer(message), grpc.StatusCode.NOT_FOUND)
        assert text == "model: expected tiny, got 'nobody' (request id: a-1)"
        stream = calls.stream()
        message = hidden_message(rows(1), request_id="a-2")
        message.model_version = "7"
        await stream.write(message)
        assert (await stream.read()).error_message.endswith("(request id: a-2)")
        await stream.done_writing()
    lines = [getattr(record, "fields", {}) for record in caplog.records]
    assert [line["request_id"] for line in lines if line.get("status") == 404] == ["a-1", "a-2"]


@pytest.mark.parametrize(("when", "expected"), [("before", [0, 1]), ("after", [1, 0])])
async def test_a_call_that_is_cancelled_as_it_is_answered_counts_once(
    monkeypatch: pytest.MonkeyPatch, when: str, expected: list[int]
) -> None:
    class Context:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        def time_remaining(self) -> None:
            return None

    async with grpc_serving(EchoRunner()) as calls:
        reply = _RpcCaller.reply

        def cancelled(caller: _RpcCaller, call: InferCall, answer: Any) -> None:
            if when == "before":
                calling.cancel()
            reply(caller, call, answer)
            if when == "after":
                calling.cancel()

        monkeypatch.setattr(_RpcCaller, "reply", cancelled)
        message = Arrived(hidden_message(rows(2)).SerializeToString(), lambda: None)
        calling = asyncio.ensure_future(calls.server._service._infer(message, [], Context()))
        with pytest.raises(asyncio.CancelledError):
            await calling
        counts = [
            calls.serving.metric("requests_total", model="tiny", status=code) for code in ("200", "499")
        ]
        assert counts == expected
