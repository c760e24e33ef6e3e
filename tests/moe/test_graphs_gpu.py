"""Steps as CUDA graphs: the answers of the layer, whatever they are padded with, in a partition too."""

import numpy as np
import pytest
import torch

from kernels import Routing, resolve_backend
from kernels.partitions import SMPartitions
from service.moe import LayerRequest, LayerRunner, LayerShape, MoELayer, random_weights
from service.moe.graphs import TOKEN_COUNTS, GraphPool, StepGraphs
from tests.kernels.helpers import forbid_host_sync, fresh_generator
from tests.moe.reference_layer import assert_close, reference_layer

pytestmark = pytest.mark.gpu

SHAPE = LayerShape(hidden_size=512, intermediate_size=256, num_experts=24, top_k=4)
SIZES = (1, 3, 16, 17, 100, 256)
DEVICE = torch.device("cuda")


def _layer(shape: LayerShape = SHAPE, routing: Routing | None = None) -> MoELayer:
    weights = random_weights(shape, fresh_generator().initial_seed(), "cuda")
    return MoELayer(shape, weights, resolve_backend("hopper"), routing=routing)


def _tokens(count: int, hidden_size: int = SHAPE.hidden_size) -> torch.Tensor:
    return torch.randn(count, hidden_size, generator=fresh_generator()).to(torch.bfloat16).pin_memory()


@pytest.fixture(scope="module")
def graphs() -> StepGraphs:
    layer = _layer()
    layer(_tokens(1).cuda())
    made = StepGraphs(layer, DEVICE, GraphPool(DEVICE))
    made.capture(None)
    return made


@pytest.mark.parametrize("count", SIZES)
def test_a_replay_gives_the_layers_bits(graphs: StepGraphs, count: int) -> None:
    layer, tokens = graphs._layer, _tokens(count)
    ids, weights = layer.route(tokens.cuda())
    graphs._out.fill_(torch.nan)
    out, loads = graphs.run(tokens, None, None, None)
    assert torch.equal(out, layer(tokens.cuda(), ids, weights))
    assert loads.tolist() == torch.bincount(ids.flatten().long(), minlength=SHAPE.num_experts).tolist()
    graphs._out.fill_(torch.nan)
    swapped = ids.flip(0).contiguous().cpu(), weights.flip(0).contiguous().cpu()
    out, _ = graphs.run(tokens, *swapped, None)
    assert torch.equal(out, layer(tokens.cuda(), ids.flip(0).contiguous(), weights.flip(0).contiguous()))
    assert graphs._out[count:].eq(0).sum() + graphs._out[count:].isnan().sum() == graphs._out[count:].numel()


def test_a_replay_never_waits(graphs: StepGraphs) -> None:
    tokens = _tokens(20)
    graphs.run(tokens, None, None, None)
    with forbid_host_sync():
        graphs.run(tokens, None, None, None)


def test_what_does_not_fit(graphs: StepGraphs) -> None:
    assert graphs.fits(_tokens(TOKEN_COUNTS[-1]))
    assert not graphs.fits(_tokens(TOKEN_COUNTS[-1] + 1))
    assert not graphs.fits(_tokens(4).float())
    masked = MoELayer(SHAPE, graphs._layer.weights, graphs._layer.backend, masked_max_tokens=8)
    assert not StepGraphs(masked, DEVICE, graphs._pool).fits(_tokens(8))


def test_shared_experts_and_a_part_of_the_layer() -> None:
    """The shared expert's group in slots of its own, and experts that are elsewhere."""
    for shape in (LayerShape(512, 256, 24, 4, 1), LayerShape(512, 256, 24, 4, 1, range(8, 16))):
        layer = _layer(shape, Routing("sigmoid", scale=2.5))
        tokens = _tokens(5)
        expected = layer(tokens.cuda())
        out, _ = StepGraphs(layer, DEVICE, GraphPool(DEVICE)).run(tokens, None, None, None)
        assert torch.equal(out, expected)


def _request(tokens: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor] | None = None) -> LayerRequest:
    data = tokens.view(torch.uint8).numpy().tobytes()
    ids, weights = (None, None) if routing is None else (r.numpy().tobytes() for r in routing)
    return LayerRequest(len(tokens), data, "BF16", ids, "INT32", weights, "FP32")


def test_a_runner_with_graphs_answers_like_one_without() -> None:
    layer = _layer()
    plain, quick = LayerRunner(layer, "cuda"), LayerRunner(layer, "cuda")
    quick.capture(GraphPool(DEVICE))
    steps = [[_request(_tokens(n))] for n in (1, 5, 300)] + [[_request(_tokens(2)), _request(_tokens(9))]]
    ids = torch.rand(7, SHAPE.num_experts).argsort(1)[:, : SHAPE.top_k].to(torch.int32)
    steps.append([_request(_tokens(7), (ids, torch.rand(7, SHAPE.top_k)))])
    steps.append([*steps[0], *steps[-1]])  # routing for some, which no graph takes
    for step in steps:
        one, other = plain.run(step), quick.run(step)
        assert one.tokens_per_expert == other.tokens_per_expert
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert np.array_equal(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32))


def test_in_a_partition_and_after_its_change() -> None:
    layer, partitions = _layer(), SMPartitions(0)
    partitions.apply({"compute": 64, "rest": 24})
    runner = LayerRunner(layer, "cuda", partitions, "compute")
    runner.capture(GraphPool(DEVICE))
    tokens = _tokens(30)
    expected = reference_layer(tokens.cuda(), layer.weights, SHAPE.top_k).cpu()
    for sizes in ({"compute": 64, "rest": 24}, {"compute": 24, "rest": 64}, {"compute": 8}):
        partitions.apply(sizes)
        for _ in range(3):
            (output,) = runner.run([_request(tokens)]).outputs
            rows = torch.frombuffer(bytearray(output), dtype=torch.float32).view(tokens.shape)
            assert_close(rows, expected)
