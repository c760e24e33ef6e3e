"""The layer of GPUs that share memory, on CPU ranks: exchanges of whole tensors replace their launches."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertd.kernels import Backend, ExpertBiases, RankTokens, compute_permutation, unpermute_rows
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.parallel import JointExchange, ParallelLayer, TorchExchange
from expertd.service.moe.parallel.torch_exchange import all_rows
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.separate import rows_per_token
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.split import experts_of_rank
from expertd.service.moe.step.step_counts import StoreCounts
from expertd.service.moe.weights import ExpertWeights
from tests.backends import CopyingDevice
from tests.kernels.helpers import diff
from tests.service.moe.lazy_device import LazyDevice
from tests.service.moe.parallel.calls import GROUPS, SHARED, alone, checked, make_case, make_routing
from tests.service.moe.parallel.cases import Case, part_of, weights_of
from tests.service.moe.parallel.ranks import Ranks
from tests.service.moe.reference_rules import RULES
from tests.service.moe.requests import layer_request
from tests.service.moe.stored import Plain

COUNTS = (6, 0, 11)


class _Exchanging(Backend):
    """Every rank gets all tokens, runs its experts on them, and adds up what all have computed."""

    def parallel_experts(self, memory: Any, tokens: RankTokens, *given: Any, **named: Any) -> None:
        """See `Backend.parallel_experts`; the layer gives all arguments by position."""
        gate_up, down, out, num_sms, offsets, _, activation, biases = given[3:]
        states, ids, weights, here = _of_all(memory, tokens, given[:3])
        rows = torch.full(states.shape, torch.nan)
        own = None if biases is None else _without_down(biases.gate_up, down.data.shape[1])
        self.experts(states, here, weights, gate_up, down, rows, activation, num_sms, offsets, own)
        _add_up(memory, tokens, rows, ids, weights, None if biases is None else biases.down, out)

    def parallel_experts_in_parts(self, memory: Any, tokens: RankTokens, *given: Any, **named: Any) -> None:
        """See `Backend.parallel_experts_in_parts`; likewise."""
        num_groups, parts_of, out, num_sms, offsets, activation, down_bias = given[3:]
        states, ids, weights, here = _of_all(memory, tokens, given[:3])
        if not len(states):
            return
        permutation = compute_permutation(here, num_groups)
        offsets.copy_(permutation.offsets)
        known = parts_of()
        inverse = known.rows(permutation.inverse.where(here >= 0, -1).int(), permutation.offsets)
        token_ids = torch.zeros(inverse.numel(), dtype=torch.int64)
        token_ids[inverse[here >= 0].long()] = torch.arange(len(states))[:, None].expand_as(here)[here >= 0]
        rows = torch.full((inverse.numel(), out.shape[1]), torch.nan, dtype=torch.bfloat16)
        first = 0
        for part in known.parts:
            ends = known.offsets[first : first + part.num_groups + 1]
            own, tokens_of = slice(int(ends[0]), int(ends[-1])), token_ids[ends[0] : ends[-1]]
            biases = part.biases and _without_down(part.biases.gate_up, out.shape[1])
            if len(tokens_of):
                ends, (gate_up, down) = ends - own.start, part.matrices
                rows[own] = self.ffn(states, tokens_of, gate_up, down, ends, activation, num_sms, biases)
            first += part.num_groups
        assert first == len(known.offsets) - 1
        sums = torch.full(states.shape, torch.nan)
        unpermute_rows(rows, inverse.clamp(min=0), weights, inverse < 0, sums)
        _add_up(memory, tokens, sums, ids, weights, down_bias, out)


def _of_all(
    memory: Any, tokens: RankTokens, of_rank: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All ranks' tokens, ids and weights; and which of this rank's experts the ids are, -1: none."""
    states, ids, weights = (all_rows(part, tokens.counts, memory.group) for part in of_rank)
    places = torch.cat([tokens.places, torch.tensor([-1], dtype=torch.int32)])[ids]
    return states, ids, weights, torch.where(places >> 16 == memory.rank, places & 0xFFFF, -1)


def _without_down(gate_up: Tensor, hidden_size: int) -> ExpertBiases:
    return ExpertBiases(gate_up, torch.zeros((len(gate_up), hidden_size), dtype=torch.bfloat16))


def _add_up(
    memory: Any, tokens: RankTokens, rows: Tensor, ids: Tensor, weights: Tensor, down_bias: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """Write this rank's tokens of what all have computed."""
    dist.all_reduce(rows, group=memory.group)
    if down_bias is not None:
        rows += (down_bias.float()[ids] * weights.masked_fill(ids < 0, 0)[..., None]).sum(1)
    first = tokens.first(memory.rank)
    out.copy_(rows[first : first + tokens.counts[memory.rank]])


class _Reference(_Exchanging, ReferenceBackend):
    """Multiplies an expert's rows together."""


class _RowByRow(_Exchanging, Plain):
    """Has bits that do not depend on the other rows, and reads weights when it multiplies."""


def _run(exchange: TorchExchange, case: Case) -> tuple[Tensor, list[int]]:
    """This rank's output, and its tokens per expert."""
    layer = _layer(exchange, case, _Reference())
    out, tokens, _ = _call(exchange, case, layer)
    return out, tokens


def _layer(exchange: TorchExchange, case: Case, backend: Backend) -> ParallelLayer:
    """This rank's part of a case's layer."""
    whole, held = weights_of(case.shape, case.seed, case.gated, case.biased), case.shape.held_experts
    own = experts_of_rank(case.physical or held, exchange.rank, exchange.num_ranks)
    slots = case.shape.top_k // rows_per_token(case.shape.top_k, case.rule)
    memory: Any = SimpleNamespace(
        num_ranks=exchange.num_ranks, rank=exchange.rank, group=exchange._group,
        hidden_size=case.shape.hidden_size, top_k=slots, check=lambda counts: None,
    )  # fmt: skip
    weights = part_of(whole, held, own, case.shape.num_shared_experts)
    return ParallelLayer(
        case.shape, weights, backend, JointExchange(memory), rule=case.rule, physical=case.physical,
        store=None if case.num_slots is None else partial(_store, case.num_slots, backend),
    )  # fmt: skip


def _store(num_slots: int, backend: Backend, shape: LayerShape, weights: ExpertWeights) -> ExpertStore:
    """A store whose copies are made as late as events allow, and whose slots and chunks are poisoned."""
    store = ExpertStore(StoreMemory(LazyDevice()), "layer", shape, weights, num_slots, backend)
    for room in (store.room, *(chunk.room for chunk in store._chunks)):
        for tensor in room.tensors:
            tensor.view(torch.uint8).fill_(0xFF)  # not a number
    return store


def _call(exchange: TorchExchange, case: Case, layer: ParallelLayer) -> tuple[Tensor, list[int], Tensor]:
    """This rank's output, its tokens per expert, and its offsets; all written over poison."""
    layer.set_token_counts([len(part) for part in case.tokens])
    tokens = case.tokens[exchange.rank]
    ids, topk_weights = (None, None) if case.given is None else case.given[exchange.rank]
    out = torch.full(tokens.shape, torch.nan, dtype=case.out_dtype)
    offsets = torch.full((case.shape.num_groups + 1,), -1, dtype=torch.int32)
    assert layer(tokens, ids, topk_weights, None, out, offsets) is out
    return out, layer.tokens_per_expert(offsets.numpy()).tolist(), offsets


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_that_of_one_rank(ranks: Ranks, rule: str, gated: bool) -> None:
    case = replace(make_case(COUNTS, SHARED), rule=RULES[rule], gated=gated)
    results = [checked(result) for result in ranks.run(GROUPS[3], _run, case)]
    assert diff(torch.cat([out for out, _ in results]), alone(ranks, case)) < 1e-5
    assert sum(sum(counts) for _, counts in results) == sum(COUNTS) * SHARED.top_k


@pytest.mark.parametrize("held", [None, range(2, 9)])
def test_experts_with_biases_and_columns_of_no_whole_blocks(ranks: Ranks, held: range | None) -> None:
    shape = LayerShape(208, 128, num_experts=10, top_k=3, local_experts=held)
    given = [(ids, weights.nan_to_num()) for ids, weights in make_routing(COUNTS)]
    case = make_case(COUNTS, shape, given=given, rule=RULES["offset"], biased=True)
    out = torch.cat([checked(result)[0] for result in ranks.run(GROUPS[3], _run, case)])
    expected = alone(ranks, case)
    assert diff(out, expected) < 1e-5
    assert diff(alone(ranks, replace(case, biased=False)), expected) > 1e-3


def _run_calls(
    exchange: TorchExchange, cases: Sequence[Case]
) -> tuple[list[tuple[Tensor, list[int], Tensor]], StoreCounts | None]:
    """What one layer gives for each of the cases, which differ in their tokens; and what its store did."""
    layer = _layer(exchange, cases[0], _RowByRow())
    with torch.inference_mode():
        results = [_call(exchange, case, layer) for case in cases]
    store = layer._own.store
    assert not (layer.is_capturable and store is not None)
    return results, None if store is None else store.counts


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize(("rule", "biased"), [("weighed input", False), ("offset", True), ("common", False)])
def test_experts_in_the_hosts_memory_give_the_same_bits(
    ranks: Ranks, rule: str, biased: bool, num_slots: int, num_ranks: int
) -> None:
    """Of 3 to 5 experts: some steps need more than there are slots, and small ones find theirs there."""
    cases = []
    for counts in ((6, 0, 11), (1, 0, 0), (1, 1, 0), (0, 0, 0), (0, 2, 1), (1, 0, 0), (9, 9, 9)):
        given = [(ids, weights.nan_to_num()) for ids, weights in make_routing(counts[:num_ranks])]
        cases.append(make_case(counts[:num_ranks], SHARED, given=given, rule=RULES[rule], biased=biased))
    cases = [replace(case, seed=cases[0].seed) for case in cases]
    whole, stored = (
        [
            checked(result)
            for result in ranks.run(
                GROUPS[num_ranks], _run_calls, [replace(case, num_slots=slots) for case in cases]
            )
        ]
        for slots in (None, num_slots)
    )
    for rank, ((results, counts), (expected, _)) in enumerate(zip(stored, whole, strict=True)):
        for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(got[0], wanted[0]), f"rank {rank}, call {number}"
            if any(len(tokens) for tokens in cases[number].tokens):
                assert got[1] == wanted[1]
                assert torch.equal(got[2], wanted[2])
            else:
                assert not any(got[1]), "no tokens at all"
        each = SHARED.expert_bytes + biased * SHARED.bias_bytes
        assert counts.num_bytes == counts.misses * each > 0
        assert counts.wait_seconds > 0
    assert any(counts.hits for _, counts in stored)


def _run_step(exchange: TorchExchange, case: Case) -> tuple[bytes, list[int]]:
    """This rank's output of a step that a runner launches, and its tokens per expert."""
    layer = _layer(exchange, case, _RowByRow())
    runner = LayerRunner(layer, CopyingDevice(torch.device("cpu")))
    assert not runner.can_capture
    own = case.tokens[exchange.rank]
    layer.set_token_counts([len(part) for part in case.tokens])
    result = runner.launch([layer_request(own, "FP32")]).finish()
    (output,) = result.outputs
    assert isinstance(output, bytes)
    return output, result.tokens_per_expert.tolist()


@pytest.mark.parametrize("physical", [None, [9, 0, 4, 4, 2, 7, 1, 8, 3, 4, 5, 6, 0]])
def test_steps_on_a_device_with_memory_of_its_own(ranks: Ranks, physical: list[int] | None) -> None:
    case = make_case((7, 0), SHARED, physical=physical)
    whole, stored = (
        [checked(each) for each in ranks.run(GROUPS[2], _run_step, replace(case, num_slots=slots))]
        for slots in (None, 2)
    )
    assert stored == whole
    assert any(whole[0][0])
    assert sum(whole[0][1] + whole[1][1]) == 7 * SHARED.top_k


def test_memory_for_tokens_instead_of_slots_is_refused() -> None:
    memory: Any = SimpleNamespace(num_ranks=1, rank=0, hidden_size=256, top_k=3)
    expected = r"^memory: expected hidden_size and top_k \(256, 1\), got \(256, 3\)$"
    with pytest.raises(ValueError, match=expected):
        ParallelLayer(
            SHARED, weights_of(SHARED, 0), _Reference(), JointExchange(memory), rule=RULES["weighed input"]
        )
