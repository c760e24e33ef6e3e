"""Experts in the host's memory as hopper packs them, without a GPU: the bits of whole layers, and bytes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertd.backends import BACKENDS
from expertd.kernels import FourBits, WeightFormat, decode
from expertd.kernels.backends.hopper.packed_weights import empty_packed, pack
from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.commands.host_memory import host_memory
from expertd.service.device.cpu import CpuDevice
from expertd.service.engine.layers import layer_of, stored_layers
from expertd.service.engine.memory_needs import check_expert_slots, expert_slots, needs_of_models
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.needs import stored_shape
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import empty_matrices, random_weights
from expertd.service.settings.parts import PlacementSettings
from expertd.weight_format import WeightLayout
from tests.families import Sizes
from tests.kernels.helpers import fresh_generator
from tests.kernels.test_packed_weights import RANDOM
from tests.service.apps import tiny_settings
from tests.service.checkpoints.builders import Checkpoint
from tests.service.moe.lazy_device import LazyDevice
from tests.service.moe.requests import layer_request, rows_of
from tests.service.moe.stored import PACKABLE, random_biases, store_of
from tests.service.moe.test_expert_store import Graphed, graphed
from tests.service.moe.unpacking import Unpacking, unpacked

HOPPER = BACKENDS["hopper"]
CPU = torch.device("cpu")
SHAPE = LayerShape(hidden_size=384, intermediate_size=128, num_experts=16, top_k=3, num_shared_experts=1)
SLOTS = 5
each_layout = pytest.mark.parametrize("layout", PACKABLE.values(), ids=PACKABLE.keys())


class GraphedUnpacking(Unpacking):
    capabilities = replace(Unpacking.capabilities, captures=True, request_table=True)
    gather_rows, scatter_rows = Graphed.gather_rows, Graphed.scatter_rows


def shapes_of(layout: WeightLayout) -> tuple[LayerShape, LayerShape]:
    """SHAPE with four bits throughout, and with shared experts in FP8."""
    routed = replace(SHAPE, weight_layout=layout)
    return replace(routed, shared_layout=layout), routed


def poison(store: ExpertStore) -> None:
    """What no copy has written must not be read."""
    for room, count in ((store.room, store.num_slots), *((chunk.room, None) for chunk in store._chunks)):
        for tensor in room.tensors:
            tensor[:count].view(torch.uint8).fill_(0xFF)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("random", RANDOM.values(), ids=RANDOM.keys())
def test_packed_weights_can_be_unpacked(
    random: Callable[[int, int, int, torch.Generator], FourBits], pairs: bool
) -> None:
    weights = random(2, 512, 256, fresh_generator())
    assert torch.equal(decode(unpacked(pack(weights, pairs), weights)), decode(weights))


@pytest.mark.slow
@pytest.mark.parametrize(("in_fp8", "biased"), [(False, False), (True, False), (False, True)])
@each_layout
def test_steps_of_any_size_have_the_bits_of_whole_layers(
    layout: WeightLayout, in_fp8: bool, biased: bool
) -> None:
    """Two layers, which share chunks; copies are made as late as events allow."""
    generator, backend = fresh_generator(), Unpacking()
    seed, shape = generator.initial_seed() % 1000, shapes_of(layout)[in_fp8]
    biases = random_biases(shape, seed) if biased else None
    memory, expert_bytes = StoreMemory(LazyDevice()), stored_shape(shape, HOPPER).expert_bytes
    made = []
    for number in (seed, seed + 1):
        store, layer = store_of(memory, shape, SLOTS, backend, number, str(number), biases)
        poison(store)
        whole = MoELayer(shape, replace(random_weights(shape, number, "cpu"), biases=biases), backend)
        made.append((store, layer, whole))
    for tokens in (1, 1, 2, 6, 0, 2):
        for _, layer, whole in made:
            given = torch.randn(tokens, shape.hidden_size, generator=generator)
            offsets, expected = (torch.full((18,), -1, dtype=torch.int32) for _ in range(2))
            assert torch.equal(layer(given, offsets=offsets), whole(given, offsets=expected)), tokens
            assert torch.equal(offsets[:17], expected[:17])
    expert_bytes += biased * shape.bias_bytes
    for store, _, _ in made:
        assert store.counts.hits > 0
        assert store.counts.num_bytes == store.counts.misses * expert_bytes > 0
        assert store.host.expert_bytes == expert_bytes
        assert store.host.part is None
        tensors = store.room.tensors
        assert sum(tensor.nbytes for tensor in tensors) == len(tensors[0]) * expert_bytes


@pytest.mark.slow
@each_layout
def test_graphs_find_packed_experts_in_slots(layout: WeightLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    device, shape, generator = LazyDevice(), shapes_of(layout)[0], fresh_generator()
    runner, _, whole = graphed(monkeypatch, shape, device, make=GraphedUnpacking)
    for turn, tokens in enumerate((1, 2, 1, 4, 9, 1, 3)):
        given = torch.randn(tokens, shape.hidden_size, generator=generator).bfloat16()
        ids = torch.rand(tokens, 16, generator=generator).argsort(1)[:, :3].int().contiguous()
        routing = ids, torch.rand(ids.shape, generator=generator)  # the router's bits depend on padding
        result = runner.run([layer_request(given, routing=routing)])
        out = rows_of(result.outputs[0], "FP32", shape.hidden_size)
        assert torch.equal(out, whole(given, *routing)), f"step {turn}"
    assert runner.launches.graph > 0


@pytest.mark.parametrize(("h", "i"), [(384, 128), (2880, 2944), (7168, 2048)])
@each_layout
def test_bytes_are_those_of_the_packed_tensors(layout: WeightLayout, h: int, i: int) -> None:
    """Also if columns are no whole blocks, as gpt-oss's."""
    h = h if h % layout.group_size == 0 else 3072
    shape, meta = LayerShape(h, i, 4, 2, weight_layout=layout), torch.device("meta")
    sizes = []
    for n, k, pairs in ((2 * i, h, True), (h, i, False)):
        matrices = empty_matrices(layout, 4, n, k, meta)
        assert isinstance(matrices, FourBits)
        packed = empty_packed(matrices, meta, pairs)
        sizes += [packed.data.nbytes, packed.scales.nbytes]
    assert 4 * stored_shape(shape, HOPPER).expert_bytes == sum(sizes)
    for backend in ("triton", "reference"):
        assert stored_shape(shape, BACKENDS[backend]) == shape


def test_scales_that_cannot_be_packed_are_refused_with_the_expert() -> None:
    shape = shapes_of(PACKABLE["MXFP4"])[0]
    weights = random_weights(shape, 1, "cpu")
    weights.down.scales[5, 0, :2] = torch.tensor([100, 120], dtype=torch.uint8)
    weights.down.data[5, 0] = 0x11
    memory = StoreMemory(CpuDevice(CPU))
    with pytest.raises(ValueError, match=r"weights scales: expected at most 2\*\*11 .* in group 5"):
        ExpertStore(memory, "tiny", shape, weights, SLOTS, Unpacking())


@pytest.mark.slow
def test_placement_moves_no_packed_experts(tmp_path: Path) -> None:
    directory = Checkpoint("gpt-oss", tmp_path / "model", mxfp4=True, sizes=Sizes(experts=16)).directory
    served = [{"path": directory, "layers": "0"}]
    whole = resolve_checkpoints(tiny_settings(models=[], checkpoints=served, ranks=2))
    budget = 5 * stored_shape(whole.models[0].shape, HOPPER).expert_bytes
    given = whole.model_copy(update={"weights_budget": budget})
    assert list(expert_slots(given, HOPPER).values()) == [3], "of 8, beside two chunks of 1"
    check_expert_slots(given, HOPPER)
    placed = given.model_copy(update={"placement": PlacementSettings(policy="static"), "backend": "hopper"})
    check_expert_slots(placed, BACKENDS["triton"])
    expected = (
        r"placement\.policy: expected null with weights_budget and experts that backend hopper packs"
        r" \(requantize: always serves them in FP8\), got static with MXFP4 in model "
    )
    with pytest.raises(ValueError, match=expected):
        check_expert_slots(placed, HOPPER)


@pytest.mark.slow
def test_the_layers_of_gpt_oss_keep_a_budget(tmp_path: Path) -> None:
    """With biases and an activation of its own, from its files."""
    directory = Checkpoint("gpt-oss", tmp_path / "model", mxfp4=True).directory
    served = [{"path": directory, "layers": "all"}]
    whole = resolve_checkpoints(tiny_settings(models=[], checkpoints=served))
    given_shape = whole.models[0].shape
    assert given_shape.weight_layout.format is WeightFormat.MXFP4
    shape = stored_shape(given_shape, HOPPER)
    budget = (len(whole.models) * 5 + 2) * shape.expert_bytes  # and two chunks
    given = whole.model_copy(update={"weights_budget": budget})
    slots = expert_slots(given, HOPPER)
    assert slots == {model.name: 5 for model in whole.models}
    held = [(model, model.num_experts) for model in whole.models]
    others = sum(5 * shape.bias_bytes + 10 * model.num_experts * model.hidden_size for model in whole.models)
    assert needs_of_models(given, held, HOPPER).weights == budget + others
    pinned, without = (sum(host_memory(each, HOPPER).pinned.values()) for each in (given, whole))
    experts = sum(model.num_experts for model in whole.models)
    assert pinned - without == experts * (shape.expert_bytes + shape.bias_bytes)
    backend, memory, generator = Unpacking(), StoreMemory(CpuDevice(CPU)), fresh_generator()
    make = stored_layers(memory, slots)
    for model in given.models:
        layer, other = (each(model, backend, CPU, lambda: False) for each in (make, layer_of))
        for tokens in (1, 3):
            hidden_states = torch.randn(tokens, given_shape.hidden_size, generator=generator)
            assert torch.equal(layer(hidden_states), other(hidden_states))
