"""Experts in the host's memory, without a GPU: which are kept, when they are copied, and the same bits."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertd.kernels import Backend, ExpertBiases, ExpertPart, resolve_backend
from expertd.kernels.backends.cpu.backend import CpuBackend
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.ops.four_bits import tensors_of
from expertd.kernels.request_table import _HEADER, _REQUEST, RequestTable
from expertd.service.device.cpu import CpuDevice
from expertd.service.moe.expert_store import StoreMemory
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import Signal
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.slot_table import SlotTable
from expertd.service.moe.step import graphs
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import fresh_generator
from tests.service.moe.lazy_device import LazyDevice, Log
from tests.service.moe.requests import layer_request, rows_of
from tests.service.moe.stored import Plain, random_biases, store_of, stores_and_whole
from tests.short import few_of

SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=48, top_k=3, num_shared_experts=1)
SLOTS = 8


def taken(table: SlotTable, *experts: int, **tokens: int) -> tuple[list[int], ...]:
    """What a step with these experts gets: present, fetched, their slots, streamed."""
    counts = np.zeros(len(table.slot_of), np.intp)
    counts[list(experts)] = 1
    for name, count in tokens.items():
        counts[int(name.removeprefix("e"))] = count
    fetches = table.take(counts)
    return tuple(
        each.tolist() for each in (fetches.present, fetches.fetched, fetches.slots, fetches.streamed)
    )


def test_the_least_recently_used_experts_leave_first() -> None:
    table = SlotTable(8, 3)
    assert taken(table, 5, 2) == ([], [2, 5], [0, 1], [])
    assert taken(table, 2) == ([2], [], [], [])
    assert taken(table, 7) == ([], [7], [2], [])
    assert taken(table, 1) == ([], [1], [1], []), "5 was used first"
    assert taken(table, 5, 7) == ([7], [5], [0], []), "and then 2"
    assert table.slot_of.tolist() == [-1, 1, -1, -1, -1, 0, -1, 2]


def test_steps_that_look_in_slots_use_experts_too() -> None:
    table = SlotTable(8, 3)
    taken(table, 5, 2, 1)
    experts = table.expert_in
    table.use(np.array([0, 1]), experts)
    assert taken(table, 7) == ([], [7], [2], []), "5 was used last by the first step"
    assert experts.tolist() == [1, 2, 5], "as that step found them"
    taken(table, 1, 2)
    table.use(np.array([2]), experts)
    assert taken(table, 6) == ([], [6], [2], []), "5 has left its slot, and nobody has used 7"


def test_experts_that_a_step_needs_stay() -> None:
    table = SlotTable(8, 2)
    taken(table, 3, 4)
    taken(table, 4)
    assert taken(table, 0, 1, 3) == ([3], [0], [1], [1]), "4 was used last, but not by this step"


def test_those_with_the_most_tokens_get_the_slots() -> None:
    table = SlotTable(8, 2)
    assert taken(table, e0=1, e1=5, e2=2, e6=5) == ([], [1, 6], [0, 1], [0, 2])
    assert taken(table, e1=1, e6=1, e0=9) == ([1, 6], [], [], [0]), "no slot is free"


def test_a_cleared_table_has_no_experts() -> None:
    table = SlotTable(4, 2)
    taken(table, 0, 1)
    table.clear()
    assert taken(table, 1) == ([], [1], [0], [])


def test_an_expert_that_has_changed_is_fetched_again_and_its_slot_is_taken_first() -> None:
    table = SlotTable(8, 3)
    taken(table, 5, 2, 1)
    before = table.expert_in
    table.remove(2)
    table.remove(7)
    assert before.tolist() == [1, 2, 5], "as steps found them"
    assert table.expert_in.tolist() == [1, -1, 5]
    assert taken(table, 1) == ([1], [], [], [])
    assert taken(table, 2) == ([], [2], [1], [])


def test_tables_stay_consistent() -> None:
    generator = np.random.default_rng(fresh_generator().initial_seed())
    table = SlotTable(20, 6)
    for _ in range(300):
        before = table.slot_of.copy()
        tokens = generator.poisson(generator.choice([0.1, 0.5, 3]), 20)
        fetches = table.take(tokens)
        needed = set(np.flatnonzero(tokens))
        parts = [set(each.tolist()) for each in (fetches.present, fetches.fetched, fetches.streamed)]
        assert set.union(*parts) == needed
        assert sum(map(len, parts)) == len(needed)
        assert parts[0] == {expert for expert in needed if before[expert] >= 0}
        kept = table.slot_of[table.slot_of >= 0]
        assert len(set(kept)) == len(kept) <= 6
        assert all(table.slot_of[list(parts[0])] == before[list(parts[0])])
        assert all(table.slot_of[list(parts[2])] < 0)
        assert not (parts[2] and len(kept) < 6), "slots stay empty only if all fit"


def hidden_states(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randn(tokens, SHAPE.hidden_size, generator=generator)


TOKENS = (1, 1, 2, 30, 1, 4, 0, 2, 60, 3)


@pytest.mark.parametrize("biased", few_of([False, True], [True]))
@pytest.mark.parametrize("make", [Plain, CpuBackend, ReferenceBackend])
def test_steps_of_any_size_have_the_bits_of_whole_layers(make: Callable[[], Backend], biased: bool) -> None:
    generator = fresh_generator()
    seed = generator.initial_seed() % 1000
    made = stores_and_whole(SHAPE, SLOTS, make(), "cpu", [seed, seed + 1], biased)
    expert_bytes = SHAPE.expert_bytes + biased * SHAPE.bias_bytes
    for tokens in (
        TOKENS if make is not ReferenceBackend else (1, 1, 2, 0, 4, 3)
    ):  # of few rows: oneDNN's bits depend on them
        for _, layer, whole in made:
            given = hidden_states(tokens, generator)
            offsets, expected = (torch.full((50,), -1, dtype=torch.int32) for _ in range(2))
            out = layer(given, offsets=offsets)
            assert torch.equal(out, whole(given, offsets=expected)), f"{tokens} tokens"
            assert torch.equal(offsets, expected)
    for store, _, _ in made:
        assert store.counts.hits > 0
        assert store.counts.num_bytes == store.counts.misses * expert_bytes
        assert store.counts.wait_seconds > 0


def test_given_routing_may_name_no_expert_and_others_may_be_elsewhere() -> None:
    shape = replace(SHAPE, local_experts=range(10, 34))
    ((_, layer, whole),) = stores_and_whole(shape, SLOTS, Plain(), "cpu", [7])
    generator = fresh_generator()
    given = hidden_states(9, generator)
    ids = torch.rand(9, 48, generator=generator).argsort(1)[:, :3].int().contiguous()
    ids[2:6, 1], ids[3] = -1, -1
    weights = torch.rand(9, 3, generator=generator)
    assert torch.equal(layer(given, ids, weights), whole(given, ids, weights))


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_step_may_need_no_expert(tokens: int) -> None:
    ((store, layer, _),) = stores_and_whole(replace(SHAPE, num_shared_experts=0), SLOTS, Plain(), "cpu", [7])
    given = hidden_states(tokens, fresh_generator())
    ids, weights = torch.full((tokens, 3), -1, dtype=torch.int32), torch.ones(tokens, 3)
    assert torch.equal(layer(given, ids, weights), torch.zeros_like(given))
    assert (store.counts.hits, store.counts.misses) == (0, 0)


def test_a_runner_counts_tokens_of_all_experts() -> None:
    ((_, layer, whole),) = stores_and_whole(SHAPE, SLOTS, resolve_backend("reference"), "cpu", [7])
    request = layer_request(hidden_states(4, fresh_generator()), "FP32")
    results = [LayerRunner(each, CpuDevice(torch.device("cpu"))).run([request]) for each in (layer, whole)]
    first, second = (rows_of(result.outputs[0], "FP32", SHAPE.hidden_size) for result in results)
    assert torch.equal(first, second)
    assert results[0].tokens_per_expert.tolist() == results[1].tokens_per_expert.tolist()


class HostTable(RequestTable):
    """In memory that no GPU reads."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(1 << 14, dtype=torch.uint8)
        self._bytes = memoryview(self._tensor.numpy())  # type: ignore[arg-type]
        self.end_token = self._tensor[:4].view(torch.int32)

    def __iter__(self) -> Iterator[tuple[slice, Any]]:
        """The requests: tokens, and (hidden_states, topk_ids, topk_weights, out) with what follows."""
        for place in range(_HEADER.unpack_from(self._bytes)[1]):
            request = _REQUEST.unpack_from(self._bytes, _HEADER.size + place * _REQUEST.size)
            yield slice(request[4], request[5]), request


class Graphed(Plain):
    """Reads and writes rows of bf16 requests with int32 ids and fp32 outputs."""

    capabilities = replace(Plain.capabilities, captures=True, request_table=True)

    def gather_rows(
        self, table: Any, hidden_states: Tensor, topk_ids: Any, topk_weights: Any, num_experts: int = 0
    ) -> None:
        if topk_ids is not None:
            topk_ids.fill_(-1)
        for tokens, (rows, ids, weights, *_) in table:
            copy_bytes(hidden_states[tokens], rows)
            if topk_ids is not None:
                copy_bytes(topk_ids[tokens], ids)
                copy_bytes(topk_weights[tokens], weights)

    def scatter_rows(self, rows: Tensor, table: Any) -> None:
        for tokens, (_, _, _, out, *_) in table:
            ctypes.memmove(out, rows[tokens].data_ptr(), rows[tokens].nbytes)


def copy_bytes(to: Tensor, address: int) -> None:
    ctypes.memmove(to.data_ptr(), address, to.nbytes)


class Logged(Plain):
    """Notes which memory each part of a step is read from."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def experts_in_parts(self, *arguments: Any) -> None:
        before, parts, after = arguments[:3], arguments[3], arguments[4:]

        def noted() -> Iterator[ExpertPart]:
            for part in parts:
                yield part
                tensors = [tensor for matrix in part.matrices for tensor in tensors_of(matrix)]
                tensors += part.biases or ()
                self._log.append(("read", [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]))

        experts: Callable[..., None] = super().experts_in_parts
        experts(*before, noted(), *after)


@pytest.mark.parametrize("biased", [False, True])
def test_steps_wait_for_copies_and_copies_for_what_reads_the_memory(biased: bool) -> None:
    device, generator = LazyDevice(), fresh_generator()
    memory = StoreMemory(device)
    backend = Logged(device.log)
    biases = random_biases(SHAPE, 3) if biased else None
    made = [store_of(memory, SHAPE, SLOTS, backend, seed, str(seed), biases) for seed in (1, 2)]
    weights = [replace(random_weights(SHAPE, seed, "cpu"), biases=biases) for seed in (1, 2)]
    whole = [MoELayer(SHAPE, each, Plain()) for each in weights]
    for tokens in TOKENS:
        for (_, layer), other in zip(made, whole, strict=True):
            given = hidden_states(tokens, generator)
            assert torch.equal(layer(given), other(given)), "a step read what was not copied yet"
    check_order(device.log)
    assert [store.counts.wait_seconds > 0 for store, _ in made] == [True, True]


def check_order(log: Log) -> None:
    """See that each copy comes after a wait for an event that was recorded after the memory's last use."""
    last_read: dict[tuple[int, int], int] = {}  # of memory, by its address and size
    recorded: dict[Any, int] = {}
    waited, overwritten = -1, 0
    for place, (kind, *what) in enumerate(log):
        if kind == "record" and what[1] == "compute":
            recorded[what[0]] = place
        elif kind == "wait" and what[1] == "copies":
            waited = recorded.get(what[0], -1)
        elif kind == "read":
            last_read |= dict.fromkeys(what[0], place)
        elif kind == "copy":
            for to, _ in what[0]:
                for (address, size), read in last_read.items():
                    if address <= to < address + size:
                        overwritten += 1
                        assert waited > read, f"entry {place} of the log overwrites what entry {read} reads"
    assert overwritten > 100


def graphed(
    monkeypatch: pytest.MonkeyPatch,
    shape: LayerShape,
    device: LazyDevice,
    biases: ExpertBiases | None = None,
    make: Callable[[], Backend] = Graphed,
) -> tuple[LayerRunner, LayerRunner, MoELayer]:
    """Runners of a store with graphs, of another without, and the layer with all experts."""
    monkeypatch.setattr(graphs, "RequestTable", HostTable)
    monkeypatch.setattr(graphs, "STORE_TOKEN_COUNTS", (1, 2, 4, 16))
    runners = [
        LayerRunner(store_of(StoreMemory(each), shape, SLOTS, make(), 3, biases=biases)[1], each)
        for each in (device, LazyDevice())
    ]
    with torch.inference_mode():
        runners[0].capture(device.new_graph_pool())
    weights = replace(random_weights(shape, 3, "cpu"), biases=biases)
    return runners[0], runners[1], MoELayer(shape, weights, make())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "biased"),
    [
        pytest.param(SHAPE, False, marks=pytest.mark.thorough),
        (SHAPE, True),
        pytest.param(replace(SHAPE, local_experts=range(10, 34)), True, marks=pytest.mark.thorough),
    ],
)
def test_graphs_find_experts_in_slots_and_run_again_without_them(
    shape: LayerShape, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, tokens of experts, hits, misses and copies are those of steps that wait for their routing."""
    generator = fresh_generator()
    biases = random_biases(shape, 3) if biased else None
    runner, eager, whole = graphed(monkeypatch, shape, LazyDevice(), biases)
    assert runner.can_capture
    last = hidden_states(1, generator).bfloat16()
    for turn, tokens in enumerate((1, 1, 2, 12, 1, 4, 2, 9, 3) * 3):
        given = hidden_states(1 if turn % 3 else tokens, generator).bfloat16()
        if turn % 3 == 1:
            given = last
        last, routing = given, None
        if turn % 4 == 0:
            ids = torch.rand(len(given), 48, generator=generator).argsort(1)[:, :3].int()
            routing = ids.where(torch.rand(ids.shape, generator=generator) < 0.9, -1), torch.rand(ids.shape)
        request = layer_request(given, routing=routing)
        expected = whole(given, *(routing or ()))
        results = [each.run([request]) for each in (runner, eager)]
        assert torch.equal(rows_of(results[0].outputs[0], "FP32", SHAPE.hidden_size), expected), (
            f"step {turn}"
        )
        first, second = (result.tokens_per_expert.tolist() for result in results)
        assert first == second
        assert results[0].empty_slots == results[1].empty_slots
    assert (runner.launches.graph, runner.launches.eager) == (27, 0)
    first, second = (asdict(each.layer.store.counts) for each in (runner, eager))  # type: ignore[attr-defined]
    assert {**first, "wait_seconds": 0} == {**second, "wait_seconds": 0}
    assert first["hits"] > 27
    assert first["wait_seconds"] > 0


def test_a_graph_whose_experts_are_there_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LazyDevice()
    runner, _, whole = graphed(monkeypatch, SHAPE, device)
    given = hidden_states(2, fresh_generator()).bfloat16()
    expected, ran = whole(given), list[tuple[int, bool]]()
    for turn in range(4):
        device.log.clear()
        step = runner.begin([replace(layer_request(given), signal=Signal(0, turn))])
        assert ("signal", turn) not in device.log, "the host does not know yet that there were all experts"
        result = step.finish()
        assert torch.equal(rows_of(result.outputs[0], "FP32", SHAPE.hidden_size), expected)
        assert device.log.count(("signal", turn)) == 1
        kinds = [kind for kind, *_ in device.log]
        ran.append((kinds.count("replay"), kinds.count("copy") > 0))
    assert ran == [(2, True), (1, False), (1, False), (1, False)]


def test_a_graph_whose_copies_fail_leaves_no_wrong_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LazyDevice()
    runner, _, whole = graphed(monkeypatch, SHAPE, device)
    given = hidden_states(2, fresh_generator()).bfloat16()
    for _ in range(2):
        step = runner.begin([layer_request(given)])
        device.fails = True
        with pytest.raises(RuntimeError, match="the copy failed"):
            step.finish()
        device.fails = False
    result = runner.run([layer_request(given)])
    assert torch.equal(rows_of(result.outputs[0], "FP32", SHAPE.hidden_size), whole(given))


def test_a_step_that_fails_leaves_no_wrong_experts() -> None:
    device = LazyDevice()
    _, layer = store_of(StoreMemory(device), SHAPE, SLOTS, Plain(), 3)
    whole = MoELayer(SHAPE, random_weights(SHAPE, 3, "cpu"), Plain())
    given = hidden_states(2, fresh_generator())
    expected = whole(given)
    device.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the copy failed"):
            layer(given)
    device.fails = False
    assert torch.equal(layer(given), expected)


def test_host_memory_is_registered_as_long_as_it_is_used() -> None:
    device = LazyDevice()
    store, layer = store_of(StoreMemory(device), SHAPE, SLOTS, Plain(), 3)
    (memory,), tensors = device.registered, store.host.tensors
    assert sum(tensor.nbytes for tensor in tensors) == 48 * SHAPE.expert_bytes
    ends = memory.address, memory.address + memory.num_bytes
    assert all(ends[0] <= t.data_ptr() <= t.data_ptr() + t.nbytes <= ends[1] for t in tensors)
    del store, layer, tensors
    assert not device.registered


def test_layers_of_one_size_share_chunks() -> None:
    memory = StoreMemory(CpuDevice(torch.device("cpu")))
    other = replace(SHAPE, num_experts=40, top_k=5)
    chunks = memory.chunks(SHAPE, False, Plain())
    assert memory.chunks(replace(other, num_experts=48), False, Plain()) is chunks
    assert memory.chunks(replace(SHAPE, hidden_size=128), False, Plain()) is not chunks
    assert memory.chunks(SHAPE, True, Plain()) is not chunks
    assert memory.chunks(other, False, Plain()) is not chunks, "with fewer experts at a time"
