"""Steps as CUDA graphs: the layer's outputs, whatever the padding, in partitions too."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from expertd.kernels import Routing, resolve_backend
from expertd.kernels.partitions import SMPartitions
from expertd.service.device import GraphPool, device_of
from expertd.service.device.cuda import CudaGraphPool
from expertd.service.engine.local_models import capture_graphs
from expertd.service.memory import host_view
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.needs import TOKEN_COUNTS
from expertd.service.moe.request import StepResult
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.batch import Batch
from expertd.service.moe.step.graphs import StepGraphs
from expertd.service.moe.step.running import RunningStep
from expertd.service.moe.step.staging import Staging
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import forbid_host_sync, fresh_generator
from tests.service.moe.reference_layer import assert_close, reference_layer
from tests.service.moe.requests import Place, as_bytes, layer_request, on_gpu, pinned, rows_of

pytestmark = pytest.mark.gpu

SHAPE = LayerShape(hidden_size=512, intermediate_size=256, num_experts=24, top_k=4)
SIZES = (1, 3, 16, 17, 100, 256)
DEVICE = torch.device("cuda")
_Routing = tuple[torch.Tensor, torch.Tensor]


def _layer(shape: LayerShape = SHAPE, routing: Routing | None = None, exact: bool = True) -> MoELayer:
    """With a router that bf16 represents exactly, or one that needs cuBLAS."""
    weights = random_weights(shape, fresh_generator().initial_seed(), "cuda")
    if not exact:
        weights = replace(weights, router=torch.randn(weights.router.shape, device="cuda"))
    return MoELayer(shape, weights, resolve_backend("hopper"), routing=routing)


def _tokens(count: int, hidden_size: int = SHAPE.hidden_size) -> torch.Tensor:
    return torch.randn(count, hidden_size, generator=fresh_generator()).to(torch.bfloat16).pin_memory()


def _graphs(layer: MoELayer, pool: GraphPool | None = None, staging: Staging | None = None) -> StepGraphs:
    pool, staging = pool or device_of(DEVICE).new_graph_pool(), staging or Staging(device_of("cuda:0"))
    return StepGraphs(layer, torch.cuda.current_stream(), None, pool, staging)


def _host_rows(graphs: StepGraphs) -> torch.Tensor:
    """Where outputs go that requests have no memory for: fp32 [256, H]."""
    rows = graphs._tensors.host_out.rows(0, TOKEN_COUNTS[-1] * SHAPE.hidden_size * 4)
    return torch.frombuffer(rows, dtype=torch.float32).view(-1, SHAPE.hidden_size)


def _replay(
    graphs: StepGraphs, tokens: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, list[int]]:
    """The output on the GPU, and the tokens of each expert."""
    result = graphs.begin(Batch([layer_request(tokens, routing=routing)])).finish()
    return rows_of(result.outputs[0], "FP32", tokens.shape[1]).cuda(), list(result.tokens_per_expert)


def _refuse_in_captures(route: Callable[..., _Routing]) -> Callable[..., _Routing]:
    """`MoELayer.route`, but in a capture it fails."""

    def refuse(layer: MoELayer, *arguments: torch.Tensor) -> _Routing:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a capture")
        return route(layer, *arguments)

    return refuse


@pytest.fixture(scope="module")
def graphs() -> StepGraphs:
    layer = _layer()
    layer(_tokens(1).cuda())
    return _graphs(layer)


@pytest.mark.parametrize("count", SIZES)
def test_a_replay_gives_the_layers_bits(graphs: StepGraphs, count: int) -> None:
    layer, tokens = graphs._layer, _tokens(count)
    outs = _host_rows(graphs)
    ids, weights = layer.route(tokens.cuda())
    outs.fill_(torch.nan)
    out, chosen = _replay(graphs, tokens)
    assert torch.equal(out, layer(tokens.cuda(), ids, weights))
    assert chosen == ids.flatten().bincount(minlength=SHAPE.num_experts).tolist()
    outs.fill_(torch.nan)
    swapped = ids.flip(0).contiguous(), weights.flip(0).contiguous()
    out, given = _replay(graphs, tokens, swapped)
    assert torch.equal(out, layer(tokens.cuda(), *swapped))
    assert given == chosen
    assert outs[count:].isnan().all(), "padding has no output"


def test_steps_do_not_affect_the_next(graphs: StepGraphs) -> None:
    """Growing and shrinking sizes, with and without given routing: padding never has an expert."""
    for count in (250, 3, 250, 17, 20, 250):
        tokens = _tokens(count)
        _, per_expert = _replay(graphs, tokens)
        assert sum(per_expert) == count * SHAPE.top_k
        ids = torch.rand(count // 2, SHAPE.num_experts).argsort(1)[:, : SHAPE.top_k].contiguous()
        _, per_expert = _replay(graphs, tokens[: count // 2], (ids, torch.rand(count // 2, SHAPE.top_k)))
        assert per_expert == ids.flatten().bincount(minlength=SHAPE.num_experts).tolist()


def test_a_step_ends_before_work_that_follows_on_its_stream(graphs: StepGraphs) -> None:
    """As a large step does that begins behind a small one."""
    running = graphs.begin(Batch([layer_request(_tokens(3))]))
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # cycles: a second
    behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
    behind.record()
    running.finish()
    assert not behind.query()  # type: ignore[no-untyped-call]
    behind.synchronize()


def test_a_replay_never_waits(graphs: StepGraphs) -> None:
    batch = Batch([layer_request(_tokens(20))])
    graphs.begin(batch).finish()
    with forbid_host_sync():
        step = graphs.begin(batch)
    step.finish()


def test_a_step_that_begins_while_another_runs_changes_nothing_of_it() -> None:
    """All graphs read the same table of requests, so the second step is launched without one."""
    runner = LayerRunner(_layer(), device_of(DEVICE))
    runner.capture(device_of(DEVICE).new_graph_pool())
    requests = [layer_request(_tokens(20), place=pinned, into=pinned) for _ in range(2)]

    def outputs(steps: list[StepResult]) -> list[bytes]:
        return [bytes(host_view(step.outputs[0])) for step in steps]

    alone = outputs([runner.run([request]) for request in requests])
    for _ in range(3):
        for request in requests:
            assert request.output is not None
            np.frombuffer(host_view(request.output), np.uint8).fill(0xFF)
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # about 10 ms, in which neither begins
        steps = [runner.begin([request]) for request in requests]
        assert outputs([step.finish() for step in steps]) == alone
    launches = runner.launches
    assert (launches.graph, launches.eager + launches.recurring) == (2 + 3, 3)


@pytest.mark.parametrize("routed", [False, True])
def test_capturing_another_layer_writes_to_no_requests_memory(routed: bool) -> None:
    """Layers of one size share the table of requests, which still names those of the last step."""
    pool, staging, first = device_of(DEVICE).new_graph_pool(), Staging(device_of("cuda:0")), _layer()
    tokens = _tokens(20)
    routing = first.route(tokens.cuda()) if routed else None
    request = layer_request(tokens, routing=routing, place=pinned, into=pinned)
    _graphs(first, pool, staging).begin(Batch([request])).finish()
    assert request.output is not None
    memory = np.frombuffer(host_view(request.output), np.uint8)
    memory.fill(0xFF)  # another request's by now
    _graphs(_layer(), pool, staging)
    torch.cuda.synchronize()
    assert (memory == 0xFF).all()


def test_captures_have_a_stream_that_nothing_else_gets() -> None:
    streams = {CudaGraphPool(DEVICE)._side_stream.cuda_stream for _ in range(3)}
    assert len(streams) == 1
    assert not streams & {torch.cuda.Stream().cuda_stream for _ in range(64)}  # type: ignore[no-untyped-call]


def test_steps_that_fit_no_graph(graphs: StepGraphs) -> None:
    def batch(*sizes: int, datatype: str = "BF16") -> Batch:
        return Batch([layer_request(_tokens(size), datatype) for size in sizes])

    assert graphs.fits(batch(TOKEN_COUNTS[-1]))
    assert graphs.fits(batch(*[1] * TOKEN_COUNTS[-1]))
    assert not graphs.fits(batch(TOKEN_COUNTS[-1] + 1))
    assert not graphs.fits(batch(4, datatype="FP32"))
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        assert not graphs.fits(batch(4)), "captured on another stream"
    masked = MoELayer(SHAPE, graphs._layer.weights, graphs._layer.backend, masked_max_tokens=8)
    assert not _graphs(masked).fits(batch(8))


SHAPES = [
    SHAPE, replace(SHAPE, num_shared_experts=2), replace(SHAPE, local_experts=range(8, 20)),
    replace(SHAPE, local_experts=range(5), num_shared_experts=1),
]  # fmt: skip


@pytest.mark.parametrize("place", [as_bytes, pinned, on_gpu])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_without_an_expert_add_nothing_and_are_counted(
    shape: LayerShape, dtype: torch.dtype, place: Place
) -> None:
    """In graphs, and launch by launch; in a GPU's memory, whose ids nobody checks, any that name none."""
    layer, generator = _layer(shape), fresh_generator()
    runner = LayerRunner(layer, device_of(DEVICE))
    runner.capture(device_of(DEVICE).new_graph_pool())
    outside = [-1, shape.num_experts]
    if place is on_gpu:
        outside += [-2, shape.num_experts + 1, torch.iinfo(dtype).min, torch.iinfo(dtype).max]
        outside += [2**32 - 1, 2**32 + 9] if dtype == torch.int64 else []
    others = torch.tensor(outside).to(dtype)
    for count, datatype in ((1, "BF16"), (20, "BF16"), (20, "FP32"), (300, "BF16")):
        tokens = _tokens(count)
        ids = torch.rand(count, shape.num_experts, generator=generator).argsort(1)[:, : shape.top_k].to(dtype)
        weights = torch.rand(count, shape.top_k, generator=generator)
        empty = torch.rand(ids.shape, generator=generator) < 0.5
        empty[1::3] = True
        ids[empty] = others[torch.arange(int(empty.sum())) % len(others)]
        weights[empty] = torch.nan
        request = layer_request(tokens, datatype, (ids, weights), place, into=pinned)
        runner.validate(request)
        for _ in range(2):
            result = runner.run([request])
        expected = reference_layer(
            tokens.cuda(), layer.weights, shape.top_k, topk_ids=ids, topk_weights=weights,
            num_shared_experts=shape.num_shared_experts, held_experts=shape.held_experts,
        )  # fmt: skip
        rows = rows_of(result.outputs[0], "FP32", shape.hidden_size)
        assert_close(rows, expected.cpu())
        assert not rows[~expected.cpu().any(1)].any(), "exactly zero"
        held = torch.tensor([expert in shape.held_experts for expert in range(shape.num_experts)])
        named = ids[~empty].bincount(minlength=shape.num_experts)
        assert list(result.tokens_per_expert) == (named * held).tolist()
        assert result.empty_slots == (int(empty.sum()) if shape.is_part else 0)
    assert runner.launches.graph == 4, "of 1 and 20 tokens in bf16"
    routed = runner.run([layer_request(_tokens(20))])
    assert routed.empty_slots == 0


def test_layers_share_a_pool() -> None:
    """Every layer after the first costs only its graphs, not the memory that they compute in."""
    pool, staging = device_of(DEVICE).new_graph_pool(), Staging(device_of("cuda:0"))
    layers = [_layer() for _ in range(4)]
    used, made = [], []
    for layer in layers:
        made.append(_graphs(layer, pool, staging))
        used.append(torch.cuda.memory_reserved())
    assert used[-1] == used[0]
    for step, layer in zip(made, layers, strict=True):
        tokens = _tokens(9)
        assert torch.equal(_replay(step, tokens)[0], layer(tokens.cuda()))


@pytest.mark.parametrize("exact", [True, False])
def test_a_runner_with_graphs_matches_one_without(exact: bool) -> None:
    layer = _layer(exact=exact)
    plain, quick = LayerRunner(layer, device_of("cuda")), LayerRunner(layer, device_of("cuda"))
    quick.capture(device_of(DEVICE).new_graph_pool())
    steps = [[layer_request(_tokens(n))] for n in (1, 5, 300)] + [
        [layer_request(_tokens(2)), layer_request(_tokens(9))]
    ]
    ids = torch.rand(7, SHAPE.num_experts).argsort(1)[:, : SHAPE.top_k].to(torch.int32)
    steps.append([layer_request(_tokens(7), routing=(ids, torch.rand(7, SHAPE.top_k)))])
    steps.append([*steps[0], *steps[-1]])  # routing for some requests only, which graphs do not support
    for step in steps:
        one, other = plain.run(step), quick.run(step)
        assert list(one.tokens_per_expert) == list(other.tokens_per_expert)
        for buffers in zip(one.outputs, other.outputs, strict=True):
            a, b = (rows_of(buffer, "FP32", SHAPE.hidden_size) for buffer in buffers)
            # cuBLAS's order of addition depends on the number of tokens, padding included.
            assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_in_a_partition_and_after_its_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replayed on the SMs on which they were captured, and on no others, after two changes too."""
    layer, partitions, replays = _layer(), SMPartitions(0), list[int]()
    begin = StepGraphs.begin

    def counted(graphs: StepGraphs, batch: Batch) -> RunningStep:
        replays.append(batch.num_tokens)
        return begin(graphs, batch)

    monkeypatch.setattr(StepGraphs, "begin", counted)
    partitions.apply({"compute": 64, "rest": 24})
    runner = LayerRunner(layer, device_of("cuda"), partitions, "compute")
    runner.capture(device_of(DEVICE).new_graph_pool())
    tokens = _tokens(30)
    expected = reference_layer(tokens.cuda(), layer.weights, SHAPE.top_k).cpu()
    for capture in (False, True):
        for sizes in ({"compute": 24, "rest": 64}, {"compute": 8}, {"compute": 64, "rest": 24}):
            partitions.apply(sizes)
            partitions.apply(sizes)  # without a step in between, which would notice the first change
            if capture:
                capture_graphs([runner], device_of(DEVICE), lambda: False)
            replays.clear()
            for _ in range(3):
                (output,) = runner.run([layer_request(tokens)]).outputs
                assert_close(rows_of(output, "FP32", SHAPE.hidden_size), expected)
            assert len(replays) == (3 if capture or sizes["compute"] == 64 else 0)


def test_a_failed_capture_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer()
    _graphs(layer)
    monkeypatch.setattr(MoELayer, "route", _refuse_in_captures(MoELayer.route))
    with pytest.raises(RuntimeError, match="not in a capture"):
        _graphs(layer)
    monkeypatch.undo()
    tokens = _tokens(4)
    assert torch.equal(_replay(_graphs(layer), tokens)[0], layer(tokens.cuda()))
