"""Stages as the GPU times them: all of a step's time, the same bits, and graphs for the steps around it."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from expertd.kernels import resolve_backend
from expertd.kernels.partitions import SMPartitions
from expertd.service.device import device_of
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.stages import Stage, StageTimer
from expertd.service.moe.weights import random_weights
from expertd.service.tracing import TracedRequest, Tracing
from tests.kernels.helpers import forbid_host_sync, fresh_generator
from tests.service.apps import hidden_request, rows, serving, tiny_settings
from tests.service.moe.requests import Place, as_bytes, layer_request, on_gpu, pinned, rows_of

pytestmark = pytest.mark.gpu

SHAPE = LayerShape(hidden_size=2048, intermediate_size=1024, num_experts=32, top_k=4)
DEVICE = torch.device("cuda", 0)
LAYER = ["router", "sort", "quantize", "gate_up", "down", "combine"]
CLOCK_SECONDS = 0.2e-3  # to which the host's time of an event is known here, at worst


def runner_of(partitions: SMPartitions | None = None, partition: str | None = None) -> LayerRunner:
    weights = random_weights(SHAPE, fresh_generator().initial_seed(), "cuda")
    layer = MoELayer(SHAPE, weights, resolve_backend("hopper"))
    made = LayerRunner(
        layer, device_of(DEVICE), partitions, partition, timer=StageTimer(device_of(DEVICE), 0.0)
    )
    made.staging.prepare(4096, SHAPE.hidden_size, SHAPE.top_k, 2)  # as a server does: growing waits
    made.capture(device_of(DEVICE).new_graph_pool())
    return made


@pytest.fixture(scope="module")
def runner() -> Iterator[LayerRunner]:
    made = runner_of()
    yield made
    made.release_graphs()


def request(num_tokens: int, place: Place = pinned, into: Place | None = pinned) -> LayerRequest:
    tokens = torch.randn(num_tokens, SHAPE.hidden_size, generator=fresh_generator()).to(torch.bfloat16)
    return layer_request(tokens, "BF16", None, place, "BF16", into)


def timed(runner: LayerRunner, made: LayerRequest) -> tuple[Sequence[Stage], float]:
    """The stages of a step, read by another thread, and the seconds that the step took."""
    made.timed = []
    before = time.perf_counter()
    result = runner.run([made])
    after = time.perf_counter()
    (step,) = made.timed
    assert step.clock == "gpu"
    with ThreadPoolExecutor(1) as thread:
        stages = thread.submit(step.stages).result()
    assert stages == step.stages()
    for stage in stages:
        assert stage.began < stage.ended, stage.name
    for one, other in pairwise(stages):
        assert one.ended <= other.began, (one.name, other.name)
    assert before - CLOCK_SECONDS < stages[0].began
    assert stages[-1].ended < after + CLOCK_SECONDS
    return stages, result.compute_seconds


@pytest.mark.parametrize("num_tokens", [1, 20, 300, 4096])
@pytest.mark.parametrize("place", [as_bytes, pinned, on_gpu])
def test_the_stages_of_a_step(runner: LayerRunner, place: Place, num_tokens: int) -> None:
    """Those in the GPU's memory are not copied; `timed` checks their times."""
    made = request(num_tokens, place, None if place is as_bytes else place)
    stages, _ = timed(runner, made)
    names = [stage.name for stage in stages]
    assert names == (LAYER if place is on_gpu else ["copy_in", *LAYER, "copy_out"])


@pytest.mark.parametrize("num_tokens", [1, 20, 256])
@pytest.mark.parametrize("place", [as_bytes, pinned, on_gpu])
def test_replays_around_it_have_the_same_bits(runner: LayerRunner, place: Place, num_tokens: int) -> None:
    made, launches = request(num_tokens, place, None if place is as_bytes else place), runner.launches
    outputs: list[torch.Tensor] = []
    counted = []
    for step in range(6):
        before = launches.graph, launches.eager
        made.timed = [] if step in (2, 3) else None
        if made.output is not None:
            assert isinstance(made.output.owner, torch.Tensor)
            made.output.owner.fill_(0xFF)  # NaN
            torch.cuda.synchronize()
        output = runner.run([made]).outputs[0]
        outputs.append(rows_of(output, "BF16", SHAPE.hidden_size))
        counted.append((launches.graph - before[0], launches.eager - before[1]))
    assert counted == [(1, 0), (1, 0), (0, 1), (0, 1), (1, 0), (1, 0)]
    assert not outputs[0].isnan().any()
    for rows_again in outputs[1:]:
        assert torch.equal(rows_again, outputs[0])


def test_a_step_that_recurs_is_replayed_again(runner: LayerRunner) -> None:
    made, launches = request(700), runner.launches
    for _ in range(12):  # until each of the two slots has its graph
        runner.run([made])
    before = launches.recurring
    expected = rows_of(runner.run([made]).outputs[0], "BF16", SHAPE.hidden_size)
    assert launches.recurring == before + 1
    made.timed = []
    between = rows_of(runner.run([made]).outputs[0], "BF16", SHAPE.hidden_size)
    assert launches.recurring == before + 1
    made.timed = None
    after = rows_of(runner.run([made]).outputs[0], "BF16", SHAPE.hidden_size)
    assert launches.recurring == before + 2
    assert torch.equal(between, expected)
    assert torch.equal(after, expected)


def test_beginning_it_never_waits(runner: LayerRunner) -> None:
    """Two at a time; while a step runs it has no stages yet, and the other's are its own."""
    made = [request(4096), request(4096)]
    for each in made:
        timed(runner, each)
        each.timed = []
    with forbid_host_sync():
        steps = [runner.begin([each]) for each in made]
    for step in steps:
        step.finish()
    first, second = (each.timed[0].stages() for each in made if each.timed)
    assert [stage.name for stage in first] == [stage.name for stage in second]
    gemm, next_gemm = (next(stage for stage in of if stage.name == "gate_up") for of in (first, second))
    assert gemm.ended < next_gemm.began + CLOCK_SECONDS


def test_in_a_partition() -> None:
    """Its stream is of another context than the events' first ones."""
    partitions = SMPartitions(0)
    partitions.apply({"compute": 64})
    runner = runner_of(partitions, "compute")
    for num_tokens in (4, 1024):
        stages, _ = timed(runner, request(num_tokens))
        assert [stage.name for stage in stages] == ["copy_in", *LAYER, "copy_out"]
    runner.release_graphs()


async def test_a_servers_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of sampled requests; needs no packages of OpenTelemetry."""
    ended: list[TracedRequest] = []
    monkeypatch.setattr(Tracing, "add", lambda self, request: ended.append(request))
    monkeypatch.setattr(Tracing, "start", lambda self: None)
    tracing = {"endpoint": "http://127.0.0.1:9/v1/traces", "sample_ratio": 0.0}
    context = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with serving(tiny_settings(backend="hopper", tracing=tracing)) as server:
        body = hidden_request(rows(3))
        plain = await server.infer(*body)
        sampled = await server.infer(*body, traceparent=context)
        assert plain.status_code == sampled.status_code == 200
        assert plain.content == sampled.content
        assert [each.tokens for each in ended] == [3]
        (step,) = ended[0].timed
        names = [stage.name for stage in step.stages()]
    assert (step.clock, names) == ("gpu", ["copy_in", *LAYER, "copy_out"])
