"""Experts in the host's memory on a GPU: the bits of a layer that has all, and steps that wait for copies."""

from dataclasses import replace

import pytest
import torch

from expertd.backends import BACKENDS
from expertd.kernels import quantize_rows, resolve_backend
from expertd.service.device import device_of
from expertd.service.engine.layers import layer_of, stored_layers
from expertd.service.engine.memory_needs import expert_slots
from expertd.service.moe.expert_budget import chunks_bytes
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.needs import stored_shape
from expertd.service.moe.request import Signal
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from expertd.weight_format import FP8_BLOCKS, WeightLayout
from tests.kernels.helpers import fresh_generator
from tests.service.apps import tiny_settings
from tests.service.moe.requests import as_bytes, layer_request, on_gpu, pinned, rows_of
from tests.service.moe.stored import PACKABLE, stores_and_whole

pytestmark = pytest.mark.gpu
on_both = pytest.mark.parametrize("backend", ["hopper", "triton"])

# Copying an expert takes about as long as a launch, or longer: a step that does not wait has other bits.
SHAPE = LayerShape(hidden_size=2048, intermediate_size=768, num_experts=48, top_k=4, num_shared_experts=1)
SLOTS = 12
in_any_form = pytest.mark.parametrize(
    ("backend", "layout"),
    [("hopper", FP8_BLOCKS), ("triton", FP8_BLOCKS), *(("hopper", layout) for layout in PACKABLE.values())],
    ids=["hopper", "triton", *(f"hopper, {name}" for name in PACKABLE)],
)


def shape_of(layout: WeightLayout) -> LayerShape:
    """With all experts in this layout."""
    return replace(SHAPE, weight_layout=layout, shared_layout=layout)


@pytest.mark.parametrize("biased", [False, True])
@in_any_form
def test_steps_of_any_size_have_the_bits_of_whole_layers(
    backend: str, layout: WeightLayout, biased: bool
) -> None:
    """Steps of two layers, which share chunks, are enqueued while those before them run."""
    generator = fresh_generator("cuda")
    seed = generator.initial_seed() % 1000
    shape, outputs = shape_of(layout), []
    made = stores_and_whole(shape, SLOTS, resolve_backend(backend), "cuda", [seed, seed + 1], biased)
    expert_bytes = stored_shape(shape, BACKENDS[backend]).expert_bytes + biased * shape.bias_bytes
    for turn in range(40):
        tokens = (1, 2, 3, 1, 700, 5, 40, 1)[turn % 8]
        hidden_states = torch.randn(tokens, SHAPE.hidden_size, device="cuda", generator=generator).bfloat16()
        outputs += [(layer(hidden_states), hidden_states, whole) for _, layer, whole in made]
    for number, (out, hidden_states, whole) in enumerate(outputs):
        assert torch.equal(out, whole(hidden_states)), f"call {number}, {len(hidden_states)} tokens"
    for store, _, _ in made:
        counts = store.counts
        assert counts.hits > 40
        assert counts.num_bytes == counts.misses * expert_bytes
        store._note_waits()
        assert 0 < counts.wait_seconds < 60


@on_both
def test_a_step_whose_experts_are_there_copies_nothing(backend: str) -> None:
    seed = fresh_generator().initial_seed() % 1000
    ((store, layer, whole),) = stores_and_whole(SHAPE, SLOTS, resolve_backend(backend), "cuda", [seed])
    hidden_states = torch.randn(2, SHAPE.hidden_size, device="cuda").bfloat16()
    routing = whole.route(hidden_states)
    for given in (hidden_states, quantize_rows(hidden_states)):
        expected = whole(given, *routing)
        layer(given, *routing)
        copied = store.counts.num_bytes
        for _ in range(3):
            assert torch.equal(layer(given, *routing), expected)
        assert store.counts.num_bytes == copied > 0


@on_both
def test_the_runner_serves_requests_from_any_memory(backend: str) -> None:
    seed = fresh_generator().initial_seed() % 1000
    ((_, layer, whole),) = stores_and_whole(SHAPE, SLOTS, resolve_backend(backend), "cuda", [seed])
    runner = LayerRunner(layer, device_of("cuda"))
    runner.staging.allow_graphs()  # of layers without a store
    for tokens in (1, 9, 300):
        hidden_states = torch.randn(tokens, SHAPE.hidden_size).bfloat16()
        expected = whole(hidden_states.cuda()).cpu()
        for place in (as_bytes, pinned, on_gpu):
            request = layer_request(hidden_states, place=place)
            for _ in range(4):  # a step of a layer without a store would become a graph
                (output,) = runner.run([request]).outputs
                assert torch.equal(rows_of(output, "FP32", SHAPE.hidden_size), expected)
    assert runner.launches.recurring == runner.launches.graph == 0


def with_graphs(layer: MoELayer) -> LayerRunner:
    runner = LayerRunner(layer, device_of("cuda"))
    runner.capture(device_of("cuda").new_graph_pool())
    return runner


@pytest.mark.parametrize("biased", [False, True])
@in_any_form
def test_graphs_find_experts_in_slots(backend: str, layout: WeightLayout, biased: bool) -> None:
    """Layers take turns, by their router or by routing that may name no expert; few steps have all."""
    generator = fresh_generator()
    seed = generator.initial_seed() % 1000
    shape = shape_of(layout)
    made = stores_and_whole(shape, SLOTS, resolve_backend(backend), "cuda", [seed, seed + 1], biased)
    expert_bytes = stored_shape(shape, BACKENDS[backend]).expert_bytes + biased * shape.bias_bytes
    runners = [with_graphs(layer) for _, layer, _ in made]
    kept = [torch.randn(2, SHAPE.hidden_size, generator=generator).bfloat16() for _ in range(2)]
    for turn in range(60):
        tokens, place = (1, 2, 1, 40, 3, 1, 64)[turn % 7], (as_bytes, pinned, on_gpu)[turn % 3]
        for number, (runner, (_, _, whole)) in enumerate(zip(runners, made, strict=True)):
            rows = torch.randn(tokens, SHAPE.hidden_size, generator=generator).bfloat16()
            rows, routing = kept[number] if turn % 2 else rows, None
            if turn % 4 > 1:
                ids = torch.rand(len(rows), 48, generator=generator).argsort(1)[:, :4].int()
                ids = ids.where(torch.rand(ids.shape, generator=generator) < 0.9, -1)
                routing = ids.contiguous(), torch.rand(ids.shape, generator=generator)
            ids, weights = (each.cuda() for each in routing or whole.route(rows.cuda()))
            offsets = torch.empty(50, dtype=torch.int32).pin_memory()
            expected = whole(rows.cuda(), ids, weights, offsets=offsets).cpu()
            result = runner.run([layer_request(rows, routing=routing, place=place)])
            out = rows_of(result.outputs[0], "FP32", SHAPE.hidden_size)
            assert torch.equal(out, expected), f"turn {turn}, layer {number}, {len(rows)} tokens"
            assert result.tokens_per_expert.tolist() == whole.tokens_per_expert(offsets.numpy()).tolist()
    for runner, (store, _, _) in zip(runners, made, strict=True):
        assert (runner.launches.graph, runner.launches.eager) == (60, 0)
        assert store.counts.hits > 60
        assert store.counts.num_bytes == store.counts.misses * expert_bytes
        runner.release_graphs()


@on_both
def test_a_graph_whose_experts_are_there_copies_nothing(backend: str) -> None:
    """The output lies in the GPU's memory, and the caller waits for a signal alone."""
    seed = fresh_generator().initial_seed() % 1000
    ((store, layer, whole),) = stores_and_whole(SHAPE, SLOTS, resolve_backend(backend), "cuda", [seed])
    runner = with_graphs(layer)
    signal = torch.zeros(1, dtype=torch.int64).pin_memory()
    rows = torch.randn(2, SHAPE.hidden_size).bfloat16()
    expected, copied = whole(rows.cuda()), list[int]()
    for turn in range(1, 6):
        request = layer_request(rows, place=on_gpu, into=on_gpu)
        step = runner.begin([replace(request, signal=Signal(signal.data_ptr(), turn))])
        result = step.finish()
        torch.cuda.synchronize()
        assert signal.item() == turn
        assert torch.equal(rows_of(result.outputs[0], "FP32", SHAPE.hidden_size), expected.cpu())
        copied.append(store.counts.num_bytes)
    assert copied[0] > 0
    assert set(copied) == {copied[0]}
    assert runner.launches.graph == 5
    runner.release_graphs()


@pytest.mark.parametrize("layout", PACKABLE.values(), ids=PACKABLE.keys())
def test_packed_experts_take_what_was_computed(layout: WeightLayout) -> None:
    """Slots and chunks, and while one expert after another is packed what that needs."""
    shape, backend, memory = shape_of(layout), resolve_backend("hopper"), StoreMemory(device_of("cuda"))
    weights = random_weights(shape, 1, "cuda", experts_on=torch.device("cpu"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    store = ExpertStore(memory, "layer", shape, weights, SLOTS, backend)
    stored, packing = (
        stored_shape(shape, backend.capabilities),
        24 * shape.hidden_size * shape.intermediate_size,
    )
    expected = (SLOTS + 1) * stored.expert_bytes + chunks_bytes([stored])
    assert store.host.expert_bytes == stored.expert_bytes
    unused = 8 << 20  # at the ends of torch's blocks
    assert expected <= torch.cuda.memory_allocated() - before < expected + unused
    assert torch.cuda.max_memory_allocated() - before < expected + packing + unused


def test_one_sm_reads_packed_experts_in_the_order_of_rows() -> None:
    """Not those that were in a slot when it was first read."""
    shape = replace(shape_of(PACKABLE["MXFP4"]), num_shared_experts=0)
    ((_, layer, whole),) = stores_and_whole(shape, SLOTS, resolve_backend("hopper"), "cuda", [3])
    for expert in range(0, 48, 4):
        ids = torch.arange(expert, expert + 4, dtype=torch.int32, device="cuda")[None]
        given = torch.randn(1, shape.hidden_size, device="cuda").bfloat16()
        routing = ids, torch.rand(1, 4, device="cuda")
        assert torch.equal(layer(given, *routing, num_sms=1), whole(given, *routing, num_sms=1)), expert


@on_both
def test_a_budget_is_kept(backend: str) -> None:
    model = {
        "name": "tiny", "hidden_size": 2048, "intermediate_size": 768, "num_experts": 48, "top_k": 4,
        "datatype": "BF16",
    }  # fmt: skip
    given = tiny_settings(models=[model], backend=backend, weights_budget="100MiB")
    before, memory = torch.cuda.memory_allocated(), StoreMemory(device_of("cuda"))
    make = stored_layers(memory, expert_slots(given, BACKENDS[backend]))
    layer = make(given.models[0], resolve_backend(backend), torch.device("cuda", 0), lambda: False)
    assert 80 << 20 < torch.cuda.memory_allocated() - before < 101 << 20, "with the router"
    whole = layer_of(given.models[0], resolve_backend(backend), torch.device("cuda", 0), lambda: False)
    hidden_states = torch.randn(100, 2048, device="cuda").bfloat16()
    assert torch.equal(layer(hidden_states), whole(hidden_states)), "random weights are those of the GPU"
