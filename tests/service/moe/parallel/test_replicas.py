"""Layers whose experts are placed in any order, with replicas, and go over to other placements."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from expertd.kernels.ops.four_bits import tensors_of
from expertd.service.moe.parallel import Exchange, ParallelLayer
from expertd.service.moe.parallel.placed import ReplicaTables
from expertd.service.moe.placement import Placement
from expertd.weight_format import FP8_BLOCKS, WeightLayout
from tests.kernels.helpers import fresh_generator
from tests.service.moe.parallel.calls import (
    BF16,
    GROUPS,
    SHAPE,
    SHARED,
    alone,
    checked,
    make_case,
    make_routing,
    outputs_of,
    reference_of,
)
from tests.service.moe.parallel.cases import Case, backend_of, call, parallel_layer, run_case, weights_of
from tests.service.moe.parallel.ranks import Ranks
from tests.service.moe.placement.greedy import chosen_replicas
from tests.service.moe.reference_layer import assert_close
from tests.service.moe.stored import FOUR_BITS

COUNTS = (5, 0, 17)
MIXED = [9, 0, 4, 4, 2, 7, 1, 8, 3, 4, 5, 6, 0]  # 13 physical experts on 3 ranks; 4 twice on one
CPU = torch.device("cpu")


def random_physical(num_physical: int, seed: int) -> list[int]:
    """A placement of SHAPE's 10 experts, each at least once."""
    random = np.random.default_rng(seed)
    spare = random.integers(0, SHAPE.num_experts, num_physical - SHAPE.num_experts)
    physical: list[int] = random.permutation([*range(SHAPE.num_experts), *spare]).tolist()
    return physical


@pytest.mark.parametrize("by_row", [True, False])
def test_the_replica_is_that_of_the_rule(by_row: bool) -> None:
    generator = fresh_generator()
    for seed in range(20):
        physical = random_physical(10 + seed, seed)
        placement = Placement(np.array(physical), 10, 3)
        ids = torch.randint(-1, 10, (50, 4), generator=generator, dtype=torch.int32)
        first = int(torch.randint(0, 2**40, (), generator=generator))
        positions = first + torch.arange(50) * int(by_row)
        tables = ReplicaTables(10, sorted(physical), 3, CPU)
        tables.replace(physical)
        chosen = tables.choose(ids, positions)
        assert np.array_equal(chosen, chosen_replicas(placement, ids, positions))
        ranks = np.append(placement.rank_of_slot(), 3)
        assert np.array_equal(tables.owners(chosen), ranks[chosen.numpy()])


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 7, 8, 16, 60, 64, 128, 256, 1024])
def test_tokens_are_spread_evenly_whatever_their_stride(stride: int) -> None:
    for count in range(2, 9):
        tables = ReplicaTables(2, [0] * count + [1], 1, CPU)
        chosen = tables.choose(torch.zeros((2048, 1), dtype=torch.int32), torch.arange(2048) * stride)
        tokens = chosen.flatten().bincount(minlength=count)
        assert int(tokens.max()) <= 1.05 * 2048 / count, tokens


def test_ids_of_no_expert_have_no_replica() -> None:
    ids = torch.tensor([[-1, 99, 3, -(2**31)]], dtype=torch.int32)
    for physical in ([*range(10)], MIXED):
        tables = ReplicaTables(10, physical, 1, CPU)
        assert tables.choose(ids, torch.tensor([5])).tolist() == [[-1, -1, physical.index(3), -1]]


def test_placements_that_are_no_placements_are_refused() -> None:
    tables = ReplicaTables(3, [0, 1, 2, 0], 2, CPU)
    for physical in ([0, 1, 2], [0, 1, 1, 0]):
        with pytest.raises(ValueError, match=r"^physical: expected 4 replicas of the same experts"):
            tables.replace(physical)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("exact", [False, True])
def test_a_placement_with_replicas_computes_the_layer(ranks: Ranks, exact: bool, by_row: bool) -> None:
    case = make_case(COUNTS, SHARED, given=make_routing(COUNTS), exact=exact, physical=MIXED, by_row=by_row)
    results = [checked(result) for result in ranks.run(GROUPS[3], run_case, case)]
    assert_close(torch.cat([out for out, *_ in results]), reference_of(case))
    ids = case.all_given[0].numpy()
    counted = np.sum([tokens for _, tokens, _ in results], axis=0)
    assert np.array_equal(counted, np.bincount(ids[ids >= 0], minlength=10)), "each expert's tokens, once"
    placement = Placement(np.array(MIXED), 10, 3)
    positions = np.arange(len(ids)) if by_row else np.full(len(ids), 7)
    chosen = chosen_replicas(placement, ids, positions)
    for rank, (_, tokens, _) in enumerate(results):
        here = ids[(chosen >= 0) & (np.append(placement.rank_of_slot(), -1)[chosen] == rank)]
        assert np.array_equal(tokens, np.bincount(here, minlength=10)), rank


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16])
def test_exact_has_the_bits_of_one_rank_with_any_placement(ranks: Ranks, out_dtype: torch.dtype) -> None:
    case = make_case(
        COUNTS, SHARED, given=make_routing(COUNTS), out_dtype=out_dtype, backend="cpu", exact=True
    )
    expected = alone(ranks, case)
    for seed, num_physical in enumerate((10, 11, 13, 24)):
        placed = replace(case, physical=random_physical(num_physical, seed), by_row=seed % 2 == 0)
        assert torch.equal(torch.cat(outputs_of(ranks, GROUPS[3], placed)), expected), placed.physical


def run_switch(exchange: Exchange, case: Case, physical: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The outputs before and after a change of the placement, with all weights written in place."""
    layer = parallel_layer(exchange, case)
    before, *_ = call(exchange, case, layer)
    weights = weights_of(case.shape, case.seed)
    for slot in layer.placed.slots:
        parts = [
            part[physical[slot]].view(torch.uint8).flatten()
            for part in (*tensors_of(weights.gate_up), *tensors_of(weights.down))
        ]
        layer.placed.prepare(0, parts)
        layer.placed.prepare(1, parts)
        layer.placed.replace(slot, parts)
    layer.placed.switch(physical)
    return before, call(exchange, case, layer)[0]


@pytest.mark.parametrize("num_slots", [None, 1, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_a_layer_goes_over_to_another_placement(ranks: Ranks, exact: bool, num_slots: int | None) -> None:
    """Also one whose experts are in the host's memory: of 4 or 5, some are in slots when all change."""
    physical = random_physical(len(MIXED), 5)
    assert physical != MIXED
    case = make_case(COUNTS, SHARED, given=make_routing(COUNTS), backend="cpu", exact=exact, physical=MIXED)
    case = replace(case, num_slots=num_slots, lazy=True)
    results = [checked(result) for result in ranks.run(GROUPS[3], run_switch, case, physical)]
    before, after = (torch.cat([result[which] for result in results]) for which in (0, 1))
    other = replace(case, physical=physical, num_slots=None)
    assert torch.equal(after, torch.cat(outputs_of(ranks, GROUPS[3], other)))
    if exact:
        assert torch.equal(before, after)
    else:
        assert_close(after, before)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("layout", FOUR_BITS.values(), ids=FOUR_BITS.keys())
def test_experts_of_four_bits_move_between_ranks(ranks: Ranks, layout: WeightLayout, splits: bool) -> None:
    shape = replace(SHARED, weight_layout=layout, shared_layout=FP8_BLOCKS if splits else layout)
    physical = random_physical(len(MIXED), 5)
    case = make_case(
        COUNTS, shape, given=make_routing(COUNTS), backend="row by row", exact=True, physical=MIXED
    )
    results = [checked(result) for result in ranks.run(GROUPS[3], run_switch, case, physical)]
    before, after = (torch.cat([result[which] for result in results]) for which in (0, 1))
    assert torch.equal(after, torch.cat(outputs_of(ranks, GROUPS[3], replace(case, physical=physical))))
    assert torch.equal(before, after)


def test_a_placement_must_hold_all_experts_of_the_layer(ranks: Ranks) -> None:
    for physical in (MIXED[:7], [*MIXED, 10]):
        result = ranks.run((0,), run_refused, make_case((1,), physical=physical))[0]
        assert str(result).startswith("physical: expected each expert of the layer and no other, got")


def run_refused(exchange: Exchange, case: Case) -> str:
    """The error of a layer whose placement does not fit."""
    weights = weights_of(case.shape, case.seed)
    try:
        ParallelLayer(case.shape, weights, backend_of("reference"), exchange, physical=case.physical)
    except ValueError as error:
        return str(error)
    return ""
