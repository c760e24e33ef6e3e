"""Steps as CUDA graphs: the layer's outputs, whatever the padding, in partitions too."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from expertd.kernels import Routing, resolve_backend
from expertd.kernels.partitions import SMPartitions
from expertd.service.engine.loading import capture_graphs
from expertd.service.memory import host_view
from expertd.service.moe.graphs import TOKEN_COUNTS, GraphPool, Step, StepGraphs
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import forbid_host_sync, fresh_generator
from tests.service.moe.reference_layer import assert_close, reference_layer

pytestmark = pytest.mark.gpu

SHAPE = LayerShape(hidden_size=512, intermediate_size=256, num_experts=24, top_k=4)
SIZES = (1, 3, 16, 17, 100, 256)
DEVICE = torch.device("cuda")


def _layer(shape: LayerShape = SHAPE, routing: Routing | None = None, exact: bool = True) -> MoELayer:
    """With a router that bf16 represents exactly, or one that needs cuBLAS."""
    weights = random_weights(shape, fresh_generator().initial_seed(), "cuda")
    if not exact:
        weights = replace(weights, router=torch.randn(weights.router.shape, device="cuda"))
    return MoELayer(shape, weights, resolve_backend("hopper"), routing=routing)


def _tokens(count: int, hidden_size: int = SHAPE.hidden_size) -> torch.Tensor:
    return torch.randn(count, hidden_size, generator=fresh_generator()).to(torch.bfloat16).pin_memory()


def _graphs(layer: MoELayer, pool: GraphPool | None = None) -> StepGraphs:
    return StepGraphs(layer, torch.cuda.current_stream(), None, pool or GraphPool(DEVICE))


@pytest.fixture(scope="module")
def graphs() -> StepGraphs:
    layer = _layer()
    layer(_tokens(1).cuda())
    return _graphs(layer)


@pytest.mark.parametrize("count", SIZES)
def test_a_replay_gives_the_layers_bits(graphs: StepGraphs, count: int) -> None:
    layer, tokens, outs = graphs._layer, _tokens(count), graphs._tensors.out
    ids, weights = layer.route(tokens.cuda())
    outs.fill_(torch.nan)
    out, chosen = graphs.run(tokens, None, None)
    assert torch.equal(out, layer(tokens.cuda(), ids, weights))
    assert torch.equal(chosen, ids)
    outs.fill_(torch.nan)
    swapped = ids.flip(0).contiguous(), weights.flip(0).contiguous()
    out, given = graphs.run(tokens, *(values.cpu() for values in swapped))
    assert torch.equal(out, layer(tokens.cuda(), *swapped))
    assert torch.equal(given, swapped[0])
    assert outs[count:].eq(0).sum() + outs[count:].isnan().sum() == outs[count:].numel()


def test_steps_do_not_affect_the_next(graphs: StepGraphs) -> None:
    """Growing and shrinking sizes, with and without given routing: padding never has an expert."""
    for count in (250, 3, 250, 17, 20, 250):
        tokens = _tokens(count)
        _, ids = graphs.run(tokens, None, None)
        assert graphs._tensors.topk_ids[count:].eq(-1).all()
        graphs.run(tokens[: count // 2], ids[: count // 2].cpu(), torch.rand(count // 2, SHAPE.top_k))
        assert graphs._tensors.topk_ids[count // 2 :].eq(-1).all()


def test_a_replay_never_waits(graphs: StepGraphs) -> None:
    tokens = _tokens(20)
    graphs.run(tokens, None, None)
    with forbid_host_sync():
        graphs.run(tokens, None, None)


def test_steps_that_fit_no_graph(graphs: StepGraphs) -> None:
    assert graphs.fits(_tokens(TOKEN_COUNTS[-1]))
    assert not graphs.fits(_tokens(TOKEN_COUNTS[-1] + 1))
    assert not graphs.fits(_tokens(4).float())
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        assert not graphs.fits(_tokens(4)), "captured on another stream"
    masked = MoELayer(SHAPE, graphs._layer.weights, graphs._layer.backend, masked_max_tokens=8)
    assert not _graphs(masked).fits(_tokens(8))


def test_shared_experts_and_a_part_of_the_layer() -> None:
    """The shared expert's group has slots of its own, and some experts are not local."""
    for shape in (LayerShape(512, 256, 24, 4, 1), LayerShape(512, 256, 24, 4, 1, range(8, 16))):
        layer = _layer(shape, Routing("sigmoid", routed_scaling_factor=2.5))
        tokens = _tokens(5)
        expected = layer(tokens.cuda())
        out, _ = _graphs(layer).run(tokens, None, None)
        assert torch.equal(out, expected)


def test_layers_share_a_pool() -> None:
    """Every layer after the first costs only its graphs, not the memory that they compute in."""
    pool, layers = GraphPool(DEVICE), [_layer() for _ in range(4)]
    used, made = [], []
    for layer in layers:
        made.append(_graphs(layer, pool))
        used.append(torch.cuda.memory_reserved())
    assert used[-1] == used[0]
    for step, layer in zip(made, layers, strict=True):
        tokens = _tokens(9)
        assert torch.equal(step.run(tokens, None, None).out, layer(tokens.cuda()))


def _request(tokens: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor] | None = None) -> LayerRequest:
    data = tokens.view(torch.uint8).numpy().tobytes()
    ids, weights = (None, None) if routing is None else (r.numpy().tobytes() for r in routing)
    return LayerRequest(len(tokens), data, "BF16", ids, "INT32", weights, "FP32")


@pytest.mark.parametrize("exact", [True, False])
def test_a_runner_with_graphs_matches_one_without(exact: bool) -> None:
    layer = _layer(exact=exact)
    plain, quick = LayerRunner(layer, "cuda"), LayerRunner(layer, "cuda")
    quick.capture(GraphPool(DEVICE))
    steps = [[_request(_tokens(n))] for n in (1, 5, 300)] + [[_request(_tokens(2)), _request(_tokens(9))]]
    ids = torch.rand(7, SHAPE.num_experts).argsort(1)[:, : SHAPE.top_k].to(torch.int32)
    steps.append([_request(_tokens(7), (ids, torch.rand(7, SHAPE.top_k)))])
    steps.append([*steps[0], *steps[-1]])  # routing for some requests only, which graphs do not support
    for step in steps:
        one, other = plain.run(step), quick.run(step)
        assert one.tokens_per_expert == other.tokens_per_expert
        for buffers in zip(one.outputs, other.outputs, strict=True):
            a, b = (np.frombuffer(host_view(buffer), np.float32) for buffer in buffers)
            # cuBLAS's order of addition depends on the number of tokens, padding included.
            assert np.array_equal(a, b) if exact else np.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_in_a_partition_and_after_its_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a removed partition are not replayed, even after two changes, until they are recaptured."""
    layer, partitions, replays = _layer(), SMPartitions(0), list[int]()
    run = StepGraphs.run

    def counted(graphs: StepGraphs, hidden_states: torch.Tensor, *routing: torch.Tensor | None) -> Step:
        replays.append(len(hidden_states))
        return run(graphs, hidden_states, *routing)

    monkeypatch.setattr(StepGraphs, "run", counted)
    partitions.apply({"compute": 64, "rest": 24})
    runner = LayerRunner(layer, "cuda", partitions, "compute")
    runner.capture(GraphPool(DEVICE))
    tokens = _tokens(30)
    expected = reference_layer(tokens.cuda(), layer.weights, SHAPE.top_k).cpu()
    for capture in (False, True):
        for sizes in ({"compute": 64, "rest": 24}, {"compute": 24, "rest": 64}, {"compute": 8}):
            partitions.apply(sizes)
            partitions.apply(sizes)  # without a step in between, which would notice the first change
            if capture:
                capture_graphs([runner], DEVICE, lambda: False)
            replays.clear()
            for _ in range(3):
                (output,) = runner.run([_request(tokens)]).outputs
                rows = torch.frombuffer(bytearray(host_view(output)), dtype=torch.float32).view(tokens.shape)
                assert_close(rows, expected)
            assert len(replays) == (3 if capture else 0)


def test_a_failed_capture_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer()
    _graphs(layer)
    route = MoELayer.route

    def refuse(layer: MoELayer, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a capture")
        return route(layer, hidden_states)

    monkeypatch.setattr(MoELayer, "route", refuse)
    with pytest.raises(RuntimeError, match="not in a capture"):
        _graphs(layer)
    monkeypatch.undo()
    tokens = _tokens(4)
    assert torch.equal(_graphs(layer).run(tokens, None, None).out, layer(tokens.cuda()))


def test_changing_partitions_leaks_no_memory() -> None:
    """None of torch's memory; the driver keeps 4 MB of each green context for good."""
    layer, partitions = _layer(exact=False), SMPartitions(0)
    runner = LayerRunner(layer, "cuda", partitions, "compute")
    used = []
    for _ in range(10):
        partitions.apply({"compute": 64})
        capture_graphs([runner], DEVICE, lambda: False)
        used.append(torch.cuda.memory_reserved())
    assert used[-1] <= max(used[:5]), used
