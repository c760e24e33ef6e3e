"""What spans are made of, which requests are sampled, and limits; needs no collector."""

import asyncio
import logging
import time
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from expertd.kernels import resolve_backend
from expertd.service.commands.serve import check_tracing
from expertd.service.device import device_of
from expertd.service.engine.steps import StepTimes
from expertd.service.grpc.tables import SERVICE
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.step import stages
from expertd.service.moe.step.stages import HostStages, StageTimer
from expertd.service.moe.weights import random_weights
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import TracingSettings
from expertd.service.tracing import TraceContext, TracedRequest, Tracing, trace_context
from expertd.service.tracing import tracing as module
from tests.service.apps import hidden_request, rows, serving, serving_runner, tiny_settings
from tests.service.grpc.calls import ON, grpc_serving, hidden_message
from tests.service.runners import EchoRunner
from tests.service.waiting import until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
SETTINGS: dict[str, Any] = {"tracing": {"endpoint": "http://127.0.0.1:9/v1/traces", "sample_ratio": 0.0}}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[TracedRequest]:
    """The requests whose spans would be made."""
    requests: list[TracedRequest] = []
    monkeypatch.setattr(Tracing, "add", lambda self, request: requests.append(request))
    monkeypatch.setattr(Tracing, "start", lambda self: None)
    return requests


async def test_a_step_has_the_tokens_of_all_its_requests(ended: list[TracedRequest]) -> None:
    runner = EchoRunner()
    runner.gate.clear()
    async with serving(tiny_settings(**SETTINGS), serving_runner(runner)) as server:
        waits = asyncio.ensure_future(server.infer(*hidden_request(rows(1)), traceparent=PARENT))
        await until(lambda: runner.steps == [[1]])
        others = [
            asyncio.ensure_future(server.infer(*hidden_request(rows(tokens)), traceparent=PARENT))
            for tokens in (2, 3)
        ]
        await until(lambda: server.metric("queue_requests", model="tiny") == 2)
        opened = time.perf_counter()
        runner.gate.set()
        await asyncio.gather(waits, *others)
    assert runner.steps == [[1], [2, 3]]
    times = {each.tokens: each.times for each in ended}
    assert {tokens: of and of.tokens for tokens, of in times.items()} == {1: 1, 2: 5, 3: 5}
    for each in ended:
        assert each.times is not None
        assert each.times.began is not None
        order = (each.started, each.times.arrived, each.times.began, each.times.ended, each.ended)
        assert list(order) == sorted(order)
    assert times[2] is not None
    assert times[2].began is not None
    assert times[2].arrived < opened < times[2].began  # it was queued during the first step


async def test_steps_of_sampled_requests_are_timed(
    ended: list[TracedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others, over HTTP as over gRPC."""
    timers: list[HostStages] = []

    def counted() -> HostStages:
        timers.append(HostStages())
        return timers[-1]

    monkeypatch.setattr(stages, "HostStages", counted)
    shape, cpu = tiny_settings().models[0].shape, torch.device("cpu")
    layer = MoELayer(shape, random_weights(shape, 3, "cpu"), resolve_backend("reference"))
    runner = LayerRunner(layer, device_of(cpu), timer=StageTimer(device_of(cpu), 0.0))
    async with grpc_serving(runner, tiny_settings(**ON, **SETTINGS)) as calls:
        message, body = hidden_message(rows(2)), hidden_request(rows(3))
        await calls.serving.infer(*body, traceparent=PARENT[:-1] + "0")
        await calls.serving.infer(*body)
        await calls.infer(message)
        assert not timers
        await calls.infer(message, metadata=(("traceparent", PARENT),))
        await calls.serving.infer(*body, traceparent=PARENT)
    assert [each.tokens for each in ended] == [2, 3]
    for each in ended:
        assert each.times is not None
        assert each.times.began is not None
        (step,) = each.timed
        assert step.clock == "host"
        names = [stage.name for stage in step.stages()]
        assert names == ["copy_in", "router", "sort", "ffn", "combine", "copy_out"]
        assert each.times.began < step.stages()[0].began
        assert step.stages()[-1].ended < each.ended


async def test_a_timeout_in_the_queue_has_no_step(ended: list[TracedRequest]) -> None:
    runner = EchoRunner()
    runner.gate.clear()
    async with serving(tiny_settings(**SETTINGS), serving_runner(runner)) as server:
        first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        await until(lambda: runner.steps == [[1]])
        late = hidden_request(rows(1), parameters={"timeout": 100_000})
        response = await server.infer(*late, traceparent=PARENT)
        runner.gate.set()
        await first
    assert response.status_code == 503
    (request,) = ended
    assert (request.status, request.reason) == (503, "queue_timeout")
    assert request.context == TraceContext(TRACE, SPAN, True)
    assert request.times is not None
    assert request.times.began is None
    assert request.times.ended - request.times.arrived > 0.09


async def test_grpc_calls_have_their_metadatas_context(ended: list[TracedRequest]) -> None:
    metadata = (("traceparent", PARENT), ("tracestate", "a=1"))
    async with grpc_serving(EchoRunner(), tiny_settings(**ON, **SETTINGS)) as calls:
        await calls.infer(hidden_message(rows(2)), metadata=metadata)
        await calls.infer(hidden_message(rows(2)))
        stream = calls.stream(metadata=metadata)
        for _ in range(2):
            await stream.write(hidden_message(rows(3)))
        await stream.done_writing()
        assert len([each async for each in stream]) == 2
        with pytest.raises(grpc.aio.AioRpcError):
            await calls.infer(hidden_message(np.zeros((65, 128), np.float32)), metadata=metadata)
    methods = ["ModelInfer", "ModelStreamInfer", "ModelStreamInfer", "ModelInfer"]
    assert [each.rpc and each.rpc.method for each in ended] == [f"{SERVICE}/{name}" for name in methods]
    assert {each.context for each in ended} == {TraceContext(TRACE, SPAN, True, ("a=1",))}
    assert [each.status for each in ended] == [200, 200, 200, 400]
    codes = [each.rpc and each.rpc.code(each.status, each.reason) for each in ended]
    assert codes == ["OK", "OK", "OK", "INVALID_ARGUMENT"]


async def test_a_log_line_has_the_trace_of_a_grpc_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = tiny_settings(**ON, access_log=True, log_format="json")
    async with grpc_serving(EchoRunner(), settings) as calls:
        await calls.infer(hidden_message(rows(2)), metadata=(("traceparent", PARENT),))
    (fields,) = (vars(line)["fields"] for line in caplog.records if line.message == "infer 200")
    assert (fields["trace_id"], fields["parent_span_id"]) == (TRACE, SPAN)


def tracing(ratio: float) -> Tracing:
    return Tracing(TracingSettings(endpoint="http://127.0.0.1:9/", sample_ratio=ratio))


def test_the_caller_decides_and_else_the_ratio() -> None:
    for ratio in (0.0, 1.0):
        assert tracing(ratio).samples(TraceContext(TRACE, SPAN, True))
        assert not tracing(ratio).samples(TraceContext(TRACE, SPAN, False))
        assert tracing(ratio).samples(None) is bool(ratio)
    half = tracing(0.5)
    assert 400 < sum(half.samples(None) for _ in range(1000)) < 600


def test_without_its_packages_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing(tiny_settings(**SETTINGS))
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    check_tracing(tiny_settings())
    expected = r"^tracing\.endpoint: expected the packages of expertd\[otel\] .*got no OTLP exporter$"
    with pytest.raises(ValueError, match=expected):
        check_tracing(tiny_settings(**SETTINGS))


def test_requests_beyond_a_limit_are_dropped_and_counted() -> None:
    full, times = tracing(1.0), StepTimes(0.1, 0.2, 0.3, 7)
    request = TracedRequest(0.0, 0.4, None, times, None, [], False, "tiny", None, 7, 200, None)
    for _ in range(module._MAX_KEPT + 3):
        full.add(request)
    assert full.dropped == 3
    assert len(full._requests) == module._MAX_KEPT


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "ftp://a/", "http://", "http:///v1/traces", "http://a b"]
)
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="endpoint"):
        Settings.model_validate({**tiny_settings().model_dump(), "tracing": {"endpoint": endpoint}})


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (PARENT, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"cc-{TRACE}-{SPAN}-03-later", True),
        ("", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01-later", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE[1:]}-{SPAN}-01", None),
        (f" {PARENT}", None),
    ],
)
def test_traceparent_is_that_of_w3c_trace_context_or_ignored(value: str, is_sampled: bool | None) -> None:
    header = (b"traceparent", value.encode())
    expected = None if is_sampled is None else TraceContext(TRACE, SPAN, is_sampled)
    assert trace_context([(b"host", b"a"), header]) == expected
    assert trace_context([header, header]) is None


def test_the_state_of_all_headers_is_kept() -> None:
    states = [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    found = trace_context([(b"traceparent", PARENT.encode()), *states])
    assert found == TraceContext(TRACE, SPAN, True, ("a=1", "b=2"))
    assert trace_context(states) is None
