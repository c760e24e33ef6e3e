"""Steps on a GPU: rows in any kind of memory, in place or copied, one step or two at a time."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from expertd.service.device import device_of
from expertd.service.memory import Arena, Span
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.step.device_step import DeviceSteps
from expertd.service.moe.step.graphs import StepGraphs
from expertd.service.moe.step.running import RunningStep
from tests.kernels.helpers import diff, forbid_host_sync, fresh_generator
from tests.service.moe.gpu_runner import DEVICE, PLACES, SHAPE, runner_with_graphs
from tests.service.moe.requests import DTYPES, Place, as_bytes, layer_request, on_gpu, pinned, rows_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runner() -> Iterator[LayerRunner]:
    """With graphs for up to 256 tokens, and memory for all steps here, as a server has it."""
    with runner_with_graphs() as runner:
        runner.staging.prepare(2048, SHAPE.hidden_size, SHAPE.top_k, 4)
        yield runner


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, SHAPE.hidden_size, generator=fresh_generator()).to(torch.bfloat16)


def _routing(count: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = fresh_generator()
    ids = torch.rand(count, SHAPE.num_experts, generator=generator).argsort(1)[:, : SHAPE.top_k]
    return ids.to(dtype), torch.rand(count, SHAPE.top_k, generator=generator)


def _expected(
    runner: LayerRunner,
    tokens: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor] | None,
    datatype: str,
) -> torch.Tensor:
    ids, weights = (None, None) if routing is None else (routing[0].int().cuda(), routing[1].cuda())
    out = torch.empty(tokens.shape, dtype=DTYPES[datatype], device="cuda")
    return runner.layer(tokens.cuda(), ids, weights, out=out).cpu()


@pytest.mark.parametrize("num_tokens", [1, 37, 256, 700])
@pytest.mark.parametrize("routed_by", ["layer", "int32", "int64"])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACES, [*PLACES, "none"])))
def test_one_request(runner: LayerRunner, source: str, target: str, routed_by: str, num_tokens: int) -> None:
    """From and to every kind of memory, the same bits as the layer."""
    tokens = _tokens(num_tokens)
    routing = None if routed_by == "layer" else _routing(num_tokens, getattr(torch, routed_by))
    into: Place | None = None if target == "none" else PLACES["pinned" if target == "bytes" else target]
    for datatype in ("BF16", "FP32"):
        request = layer_request(tokens, "BF16", routing, PLACES[source], datatype, into)
        result = runner.run([request])
        rows = rows_of(result.outputs[0], datatype, SHAPE.hidden_size)
        assert torch.equal(rows, _expected(runner, tokens, routing, datatype))
        assert sum(result.tokens_per_expert) == num_tokens * SHAPE.top_k
        if routing is not None:
            assert list(result.tokens_per_expert) == routing[0].flatten().bincount(minlength=24).tolist()


@pytest.mark.parametrize("datatype", ["BF16", "FP16", "FP32"])
def test_the_router_alone(runner: LayerRunner, datatype: str) -> None:
    """What it chooses is what a step of the same rows computes."""
    tokens = _tokens(37).to(DTYPES[datatype])
    request = layer_request(tokens, datatype)
    topk_ids, topk_weights = runner.route(request)
    assert topk_ids.shape == topk_weights.shape == (37, SHAPE.top_k)
    ids, weights = runner.layer.route(tokens.cuda())
    assert torch.equal(torch.from_numpy(topk_ids), ids.cpu())
    assert torch.equal(torch.from_numpy(topk_weights), weights.cpu())
    counts = torch.from_numpy(topk_ids).flatten().bincount(minlength=SHAPE.num_experts)
    assert list(runner.run([request]).tokens_per_expert) == counts.tolist()


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (50, 1, 100, 7), (300, 1, 250, 90)])
@pytest.mark.parametrize("given", ["none", "all", "some"])
def test_requests_of_every_kind_in_one_step(runner: LayerRunner, sizes: tuple[int, ...], given: str) -> None:
    kinds: list[tuple[Place, str, Place | None]] = [
        (as_bytes, "BF16", None),
        (pinned, "FP16", pinned),
        (on_gpu, "FP32", on_gpu),
        (on_gpu, "BF16", pinned),
    ]
    requests, expected = [], []
    for index, (size, (place, datatype, into)) in enumerate(zip(sizes, kinds, strict=True)):
        with_routing = given == "all" or (given == "some" and index % 2 == 0)
        tokens, routing = _tokens(size), _routing(size, torch.int64) if with_routing else None
        requests.append(layer_request(tokens, "BF16", routing, place, datatype, into))
        expected.append((_expected(runner, tokens, routing, datatype), datatype))
    result = runner.run(requests)
    for output, (rows, datatype) in zip(result.outputs, expected, strict=True):
        assert torch.equal(rows_of(output, datatype, SHAPE.hidden_size), rows)
    assert sum(result.tokens_per_expert) == sum(sizes) * SHAPE.top_k


@pytest.mark.parametrize("sizes", [(700,), (300, 500)])
def test_pinned_memory_is_taken_for_outputs_without_a_place_and_for_no_more(sizes: tuple[int, ...]) -> None:
    with runner_with_graphs() as runner:
        steps = runner.staging._all
        held = [_tokens(size) for size in sizes]
        requests = [layer_request(rows, "BF16", None, pinned, "BF16", pinned) for rows in held]
        for _ in range(3):
            runner.run(requests)
        assert [step.host_out.num_bytes for step in steps] == [0] * len(steps)
        without = replace(requests[0], output=None, plan=None)
        result = runner.run([without, *requests[1:]])
        taken = sizes[0] * SHAPE.hidden_size * 2
        assert max(step.host_out.num_bytes for step in steps) == taken
        for output, rows in zip(result.outputs, held, strict=True):
            expected = _expected(runner, rows, None, "BF16")
            assert torch.equal(rows_of(output, "BF16", SHAPE.hidden_size), expected)


@pytest.mark.parametrize("num_tokens", [9, 400])
def test_mixed_datatypes(runner: LayerRunner, num_tokens: int) -> None:
    tokens = [_tokens(num_tokens) for _ in DTYPES]
    pairs = list(zip(tokens, DTYPES, strict=True))
    requests = [layer_request(rows, datatype, None, pinned, datatype, pinned) for rows, datatype in pairs]
    for output, (rows, datatype) in zip(runner.run(requests).outputs, pairs, strict=True):
        expected = _expected(runner, rows, None, "FP32")
        assert diff(rows_of(output, datatype, SHAPE.hidden_size).float(), expected) < 1e-3


@pytest.mark.parametrize("num_tokens", [3, 300])
@pytest.mark.parametrize("past", [1, 2, 8])
def test_rows_at_any_address(runner: LayerRunner, past: int, num_tokens: int) -> None:
    """Kernels need aligned rows; others are copied first."""
    tokens, routing = _tokens(num_tokens), _routing(num_tokens, torch.int64)

    def place(tensor: torch.Tensor) -> object:
        return on_gpu(tensor, past)

    request = layer_request(tokens, "BF16", routing, place, "BF16", place)  # type: ignore[arg-type]
    output = runner.run([request]).outputs[0]
    rows = rows_of(output, "BF16", SHAPE.hidden_size)
    assert torch.equal(rows, _expected(runner, tokens, routing, "BF16"))


@pytest.mark.parametrize("sizes", [(600, 600), (600, 20), (1024, 700)])
def test_two_steps_at_a_time(runner: LayerRunner, sizes: tuple[int, int]) -> None:
    """The second begins while the first runs, and neither begin waits for the GPU."""
    for place, into in ((pinned, pinned), (on_gpu, on_gpu), (as_bytes, None)):
        tokens = [_tokens(size) for size in sizes]
        requests = [layer_request(rows, "BF16", None, place, "BF16", into) for rows in tokens]
        for request in requests:
            runner.run([request])
        with forbid_host_sync():
            steps = [runner.begin([request]) for request in requests]
        for step, rows in zip(steps, tokens, strict=True):
            output = step.finish().outputs[0]
            assert torch.equal(
                rows_of(output, "BF16", SHAPE.hidden_size), _expected(runner, rows, None, "BF16")
            )


def test_a_step_whose_memory_grows_takes_none_of_one_that_runs() -> None:
    """What the first step's launches have freed is theirs until they end."""
    with runner_with_graphs() as runner:
        tokens = [_tokens(600), _tokens(2000)]
        requests = [layer_request(rows, "BF16", None, pinned, "BF16", pinned) for rows in tokens]
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # about 10 ms, in which neither begins
        steps = [runner.begin([request]) for request in requests]
        for step, rows in zip(steps, tokens, strict=True):
            output = step.finish().outputs[0]
            expected = _expected(runner, rows, None, "BF16")
            assert torch.equal(rows_of(output, "BF16", SHAPE.hidden_size), expected)


def test_a_third_step_is_refused_and_changes_nothing(runner: LayerRunner) -> None:
    tokens = _tokens(600)
    request = layer_request(tokens, "BF16", None, pinned, "BF16", pinned)
    steps = [runner.begin([request]) for _ in range(2)]
    with pytest.raises(RuntimeError, match="steps: expected at most 2"):
        runner.begin([request])
    for step in steps:
        step.finish()
        assert step.is_done()
    assert len(runner.run([request]).outputs) == 1


def test_blocks_of_the_arena_are_read_and_written_in_place(runner: LayerRunner) -> None:
    arena = Arena(1 << 24, device_of(DEVICE).register)
    for num_tokens in (1, 200, 1000):
        tokens = _tokens(num_tokens)
        source, target = arena.take(tokens.numel() * 2), arena.take(tokens.numel() * 2)
        assert source is not None
        assert target is not None
        source.view[:] = as_bytes(tokens)
        target.view[:] = bytes(len(target.view))
        plain = layer_request(tokens, output_datatype="BF16")
        request = replace(plain, hidden_states=source.span, output=target.span)
        assert runner.run([request]).outputs == [target.span]
        rows = rows_of(target.view, "BF16", SHAPE.hidden_size)
        assert torch.equal(rows, _expected(runner, tokens, None, "BF16"))
        source.release()
        target.release()
    arena.close()


@pytest.mark.parametrize("with_routing", [False, True])
@pytest.mark.parametrize("place", [pinned, on_gpu])
def test_large_steps_that_recur_are_captured(
    runner: LayerRunner, monkeypatch: pytest.MonkeyPatch, place: Place, with_routing: bool
) -> None:
    """After some steps on the same memory, new contents there give the layer's bits, without its launches."""
    routing = _routing(700) if with_routing and place is pinned else None
    plain = layer_request(_tokens(700), "BF16", routing, place, "BF16", place)
    calls = []
    call = MoELayer.__call__

    def counted(layer: MoELayer, *arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return call(layer, *arguments, **options)

    monkeypatch.setattr(MoELayer, "__call__", counted)
    for step in range(20):
        tokens = _tokens(700)
        held = plain.hidden_states
        assert isinstance(held, Span)
        assert isinstance(held.owner, torch.Tensor)
        held.owner.copy_(tokens.view(torch.uint8).view(-1))
        torch.cuda.synchronize()
        calls.clear()
        output = runner.run([plain]).outputs[0]
        if step > 8:  # each of the two slots has captured it
            assert not calls
        rows = rows_of(output, "BF16", SHAPE.hidden_size)
        assert torch.equal(rows, _expected(runner, tokens, routing, "BF16"))


@pytest.mark.parametrize("num_tokens", [20, 700])
def test_steps_of_ranks_repeat_a_requests_plan(
    runner: LayerRunner, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """`replay` and `launch`: what lies in the request's memory now has the layer's bits, also by a plan."""
    repeated = []
    for kind in (StepGraphs, DeviceSteps):

        def again(steps: Any, request: LayerRequest, original: Any = kind.again) -> RunningStep | None:
            step: RunningStep | None = original(steps, request)
            repeated.append(step is not None)
            return step

        monkeypatch.setattr(kind, "again", again)
    request = layer_request(_tokens(num_tokens), "BF16", None, pinned, "BF16", pinned)
    for _ in range(12):
        tokens = _tokens(num_tokens)
        held = request.hidden_states
        assert isinstance(held, Span)
        assert isinstance(held.owner, torch.Tensor)
        held.owner.copy_(tokens.view(torch.uint8).view(-1))
        step = runner.replay([request], 24, True) if num_tokens < 24 else runner.launch([request])
        assert step is not None
        rows = rows_of(step.finish().outputs[0], "BF16", SHAPE.hidden_size)
        assert torch.equal(rows, _expected(runner, tokens, None, "BF16"))
    assert (repeated[0], repeated[-1]) == (False, True)


def test_graphs_of_large_steps_are_bounded_and_freed(runner: LayerRunner) -> None:
    for num_tokens in range(300, 345):
        request = layer_request(_tokens(num_tokens), "BF16", None, pinned, "BF16", pinned)
        for _ in range(8):
            runner.run([request])
    recurring = runner._on_device._recurring
    assert 0 < len(recurring._graphs) <= 32
    assert len(recurring._seen) <= 32
    runner.release_graphs()
    assert not recurring._graphs
    request = layer_request(_tokens(300), "BF16", None, pinned, "BF16", pinned)
    for _ in range(8):
        runner.run([request])
    assert not recurring._graphs, "nothing is captured between a change of partitions and its graphs"
    runner.capture(device_of(DEVICE).new_graph_pool())
    for _ in range(8):
        runner.run([request])
    assert recurring._graphs


def test_graphs_that_were_released_keep_no_memory(runner: LayerRunner) -> None:
    """Though a request that may recur still refers to them."""
    own = LayerRunner(runner.layer, device_of(DEVICE), with_graphs=False)
    request = layer_request(_tokens(2048), "BF16", None, pinned, "BF16", pinned)
    own.run([request])
    device_of(DEVICE).free_unused()
    before = torch.cuda.memory_reserved()
    own.capture(device_of(DEVICE).new_graph_pool())
    for _ in range(8):
        own.run([request])
    assert request.plan is not None
    device_of(DEVICE).free_unused()
    assert torch.cuda.memory_reserved() > before
    own.release_graphs()
    device_of(DEVICE).free_unused()
    assert torch.cuda.memory_reserved() <= before
