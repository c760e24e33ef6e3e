"""Which steps are timed, and their stages on a CPU."""

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertd.activation import ExpertRule
from expertd.kernels import OtherGlu, resolve_backend
from expertd.service.device import Device, device_of
from expertd.service.device.cuda import CudaDevice
from expertd.service.engine.chunks import part_of
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step import stages as module
from expertd.service.moe.step.stages import StageTimer
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import fresh_generator
from tests.service.moe.requests import layer_request

GPU = CudaDevice(torch.device("cuda"))
SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
WITH_SHARED = LayerShape(256, 128, 8, 2, num_shared_experts=1)
EXPERTS = ["sort", "ffn", "combine"]


def layer_of(shape: LayerShape = SHAPE, **options: Any) -> MoELayer:
    return MoELayer(shape, random_weights(shape, 3, "cpu"), resolve_backend("reference"), **options)


def runner_of(layer: MoELayer) -> LayerRunner:
    return LayerRunner(layer, device_of("cpu"), timer=StageTimer(device_of("cpu"), 0.0))


def request(num_tokens: int, timed: bool = True, routed: bool = True) -> LayerRequest:
    generator = fresh_generator()
    ids = torch.rand(num_tokens, SHAPE.num_experts, generator=generator).argsort(1)[:, : SHAPE.top_k]
    routing = None if routed else (ids.contiguous(), torch.ones(num_tokens, SHAPE.top_k))
    made = layer_request(torch.randn(num_tokens, 256, generator=generator), "FP32", routing)
    made.timed = [] if timed else None
    return made


def names(made: LayerRequest) -> list[str]:
    """Of the stages of its only step."""
    assert made.timed is not None
    (step,) = made.timed
    return [stage.name for stage in step.stages()]


def test_the_stages_of_a_step_are_all_of_its_time() -> None:
    made = request(40)
    before = time.perf_counter()
    result = runner_of(layer_of()).run([made])
    after = time.perf_counter()
    assert made.timed is not None
    (step,) = made.timed
    stages = step.stages()
    assert step.clock == "host"
    assert [stage.name for stage in stages] == ["copy_in", "router", *EXPERTS, "copy_out"]
    assert before < stages[0].began
    assert stages[-1].ended < after
    for stage in stages:
        assert stage.began < stage.ended
    for one, other in pairwise(stages):
        assert one.ended == other.began
    total = stages[-1].ended - stages[0].began
    assert abs(total - result.compute_seconds) < 0.1 * total + 5e-3  # a thread may be interrupted


def test_the_stages_of_other_steps() -> None:
    runner = runner_of(layer_of(masked_max_tokens=4))
    given, routed, few = request(9, routed=False), request(8), request(4)
    runner.run([given])
    assert names(given) == ["copy_in", *EXPERTS, "copy_out"]
    runner.run([few])
    assert names(few) == ["copy_in", "router", "experts", "copy_out"]
    given = request(9, routed=False)
    runner.run([given, routed, request(2, timed=False)])
    assert names(given) == ["copy_in", "router", *EXPERTS, "copy_out"]
    assert given.timed == routed.timed, "it is one step"
    two = request(9)
    runner_of(layer_of(WITH_SHARED, rule=ExpertRule(routed=OtherGlu()))).run([two])
    assert names(two) == ["copy_in", "router", *EXPERTS, *EXPERTS, "copy_out"]


def test_outputs_are_the_same() -> None:
    runner, made = runner_of(layer_of()), request(20)
    timed = runner.run([made]).outputs
    made.timed = None
    assert runner.run([made]).outputs == timed


def test_a_step_of_a_long_request_is_one_of_its() -> None:
    whole = request(64)
    runner = runner_of(layer_of())
    for start in (0, 32):
        runner.run([part_of(whole, start, 32)])
    assert whole.timed is not None
    assert len(whole.timed) == 2
    first, second = (step.stages() for step in whole.timed)
    assert first[-1].ended < second[0].began


@pytest.mark.parametrize("device", [GPU, device_of("cpu")])
def test_few_steps_are_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer, and so do its spans."""
    now = 5.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    timer = StageTimer(device)
    timed = 0
    for step in range(1000):  # one each millisecond
        now = 5.0 + step / 1e3
        timed += timer.new() is not None
    assert timed == 10
