"""The layer of GPUs that share memory, on CPU ranks: exchanges of whole tensors replace their launches."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertd.kernels import ExpertBiases, RankTokens
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.service.moe.parallel import JointExchange, ParallelLayer, TorchExchange
from expertd.service.moe.parallel.torch_exchange import all_rows
from expertd.service.moe.separate import rows_per_token
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.split import experts_of_rank
from tests.kernels.helpers import diff
from tests.service.moe.parallel.calls import GROUPS, SHARED, alone, checked, make_case, make_routing
from tests.service.moe.parallel.cases import Case, part_of, weights_of
from tests.service.moe.parallel.ranks import Ranks
from tests.service.moe.reference_rules import RULES

COUNTS = (6, 0, 11)


class _Exchanging(ReferenceBackend):
    """Every rank gets all tokens, runs its experts on them, and adds up what all have computed."""

    def parallel_experts(self, memory: Any, tokens: RankTokens, *given: Any, **named: Any) -> None:
        """See `Backend.parallel_experts`; the layer gives all arguments by position."""
        hidden_states, topk_ids, topk_weights, gate_up, down, out, num_sms, offsets = given[:8]
        _, activation, biases = given[8:]
        counts, rank, group = tokens.counts, memory.rank, memory.group
        states, ids, weights = (
            all_rows(part, counts, group) for part in (hidden_states, topk_ids, topk_weights)
        )
        places = torch.cat([tokens.places, torch.tensor([-1], dtype=torch.int32)])[ids]
        here = torch.where(places >> 16 == rank, places & 0xFFFF, -1)
        rows = torch.empty(states.shape)
        own = (
            None
            if biases is None
            else ExpertBiases(biases.gate_up, torch.zeros(down.data.shape[:2], dtype=torch.bfloat16))
        )
        self.experts(states, here, weights, gate_up, down, rows, activation, num_sms, offsets, own)
        dist.all_reduce(rows, group=group)
        if biases is not None:
            rows += (biases.down.float()[ids] * weights.masked_fill(ids < 0, 0)[..., None]).sum(1)
        first = sum(counts[:rank])
        out.copy_(rows[first : first + counts[rank]])


def _run(exchange: TorchExchange, case: Case) -> tuple[Tensor, list[int]]:
    """This rank's output, and its tokens per expert."""
    whole, held = weights_of(case.shape, case.seed, case.gated, case.biased), case.shape.held_experts
    own = experts_of_rank(held, exchange.rank, exchange.num_ranks)
    slots = case.shape.top_k // rows_per_token(case.shape.top_k, case.rule)
    memory: Any = SimpleNamespace(
        num_ranks=exchange.num_ranks, rank=exchange.rank, group=exchange._group,
        hidden_size=case.shape.hidden_size, top_k=slots, check=lambda counts: None,
    )  # fmt: skip
    weights = part_of(whole, held, own, case.shape.num_shared_experts)
    layer = ParallelLayer(case.shape, weights, _Exchanging(), JointExchange(memory), rule=case.rule)
    layer.set_token_counts([len(part) for part in case.tokens])
    tokens = case.tokens[exchange.rank]
    ids, topk_weights = (None, None) if case.given is None else case.given[exchange.rank]
    out = torch.full(tokens.shape, torch.nan, dtype=case.out_dtype)
    offsets = torch.full((case.shape.num_groups + 1,), -1, dtype=torch.int32)
    assert layer(tokens, ids, topk_weights, None, out, offsets) is out
    return out, layer.tokens_per_expert(offsets.numpy()).tolist()


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


def test_memory_for_tokens_instead_of_slots_is_refused() -> None:
    memory: Any = SimpleNamespace(num_ranks=1, rank=0, hidden_size=256, top_k=3)
    expected = r"^memory: expected hidden_size and top_k \(256, 1\), got \(256, 3\)$"
    with pytest.raises(ValueError, match=expected):
        ParallelLayer(
            SHARED, weights_of(SHARED, 0), _Exchanging(), JointExchange(memory), rule=RULES["weighed input"]
        )
