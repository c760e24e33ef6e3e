"""What the layer computes on 1 to 4 ranks, against float64, one rank and sums written out."""

from dataclasses import replace

import pytest
import torch

from expertd.activation import COMMON
from expertd.service.moe.shape import LayerShape
from tests.kernels.helpers import diff
from tests.service.moe.parallel.calls import (
    BF16,
    COUNTS,
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
from tests.service.moe.parallel.cases import run_case, run_parts
from tests.service.moe.parallel.ranks import Ranks
from tests.service.moe.reference_layer import assert_close
from tests.service.moe.reference_rules import RULES
from tests.service.moe.stored import FOUR_BITS


@pytest.mark.parametrize("number", GROUPS)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(BF16, BF16), (torch.float16, torch.float16), (torch.float32, torch.float32), (BF16, torch.float32)],
)
def test_the_layer_matches_the_reference(
    ranks: Ranks, number: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    case = make_case(COUNTS[-number:], SHARED, dtype=dtype, out_dtype=out_dtype)
    outputs = outputs_of(ranks, GROUPS[number], case)
    assert [(len(out), out.dtype) for out in outputs] == [(n, out_dtype) for n in COUNTS[-number:]]
    assert_close(torch.cat(outputs), reference_of(case))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_other_rules_are_those_of_one_rank(ranks: Ranks, rule: str, gated: bool, exact: bool) -> None:
    case = replace(make_case((6, 0, 11), SHARED), rule=RULES[rule], gated=gated, exact=exact)
    out = torch.cat(outputs_of(ranks, GROUPS[3], case))
    expected = alone(ranks, case)
    assert diff(out, expected) < 1e-5
    if rule != "common":
        assert diff(alone(ranks, replace(case, rule=COMMON)), expected) > 1e-4
    if gated:
        assert diff(alone(ranks, replace(case, gated=False)), expected) > 1e-4


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_experts_with_biases_and_columns_of_no_whole_blocks_are_those_of_one_rank(
    ranks: Ranks, packed: bool, exact: bool
) -> None:
    shape = LayerShape(hidden_size=208, intermediate_size=128, num_experts=10, top_k=3)
    counts = (6, 11)
    case = make_case(counts, shape, given=make_routing(counts), rule=RULES["offset"], biased=True)
    case = replace(case, exact=exact, packed=packed)
    out, expected = torch.cat(outputs_of(ranks, GROUPS[2], case)), alone(ranks, case)
    assert diff(out, expected) < 1e-5
    assert diff(alone(ranks, replace(case, biased=False)), expected) > 1e-3


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rule", ["weighed input", "shared clamped", "common"])
def test_packed_weights_give_the_same_bits(ranks: Ranks, rule: str, exact: bool) -> None:
    case = replace(make_case((6, 11), SHARED), rule=RULES[rule], exact=exact)
    plain, packed = (
        torch.cat(outputs_of(ranks, GROUPS[2], replace(case, packed=packed))) for packed in (False, True)
    )
    assert torch.equal(plain, packed)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("rule", "biased"), [("weighed input", False), ("offset", True), ("common", False)])
def test_experts_in_the_hosts_memory_give_the_same_bits(
    ranks: Ranks, rule: str, biased: bool, exact: bool, lazy: bool
) -> None:
    """With two slots for each rank's experts."""
    counts = (6, 0, 11)
    case = make_case(counts, SHARED, given=make_routing(counts), rule=RULES[rule], backend="cpu")
    case = replace(case, exact=exact, biased=biased, lazy=lazy)
    whole, stored = (
        ranks.run(GROUPS[3], run_case, replace(case, num_slots=num_slots)) for num_slots in (None, 2)
    )
    for (out, tokens, offsets), (expected, *others) in zip(stored, whole, strict=True):
        assert torch.equal(out, expected)
        assert tokens == others[0]
        assert torch.equal(offsets, others[1])
    assert any(out.any() for out, *_ in stored)


def test_experts_in_the_hosts_memory_may_be_packed(ranks: Ranks) -> None:
    """The shared one is packed, too, beside the store."""
    counts = (6, 0, 11)
    shape = replace(SHARED, weight_layout=FOUR_BITS["MXFP4"], shared_layout=FOUR_BITS["MXFP4"])
    case = make_case(counts, shape, given=make_routing(counts), backend="unpacking")
    whole, stored = (
        ranks.run(GROUPS[3], run_case, replace(case, num_slots=num_slots, packed=True))
        for num_slots in (None, 2)
    )
    for (out, tokens, offsets), (expected, *others) in zip(stored, whole, strict=True):
        assert torch.equal(out, expected)
        assert tokens == others[0]
        assert torch.equal(offsets, others[1])
    assert any(out.any() for out, *_ in stored)


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("out_dtype", [torch.float32, BF16, torch.float16])
def test_ranks_are_added_in_their_order_then_shared_experts(
    ranks: Ranks, number: int, out_dtype: torch.dtype
) -> None:
    counts = COUNTS[:number]
    case = make_case(counts, SHARED, given=make_routing(counts), out_dtype=out_dtype, backend="cpu")
    parts = checked(ranks.run((0,), run_parts, case, number)[0])
    back = BF16 if out_dtype == BF16 else torch.float32
    expected = torch.zeros_like(parts[0])
    for part in parts[:number]:
        expected += part.to(back)
    for part in parts[number:]:
        expected += part
    assert torch.equal(torch.cat(outputs_of(ranks, GROUPS[number], case)), expected.to(out_dtype))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(torch.float32, torch.float32), (BF16, BF16), (torch.float16, torch.float32)]
)
def test_exact_has_the_bits_of_one_rank(
    ranks: Ranks, number: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    counts = COUNTS[-number:]
    case = make_case(
        counts, SHARED, given=make_routing(counts), dtype=dtype, out_dtype=out_dtype,
        backend="cpu", exact=True,
    )  # fmt: skip
    out = torch.cat(outputs_of(ranks, GROUPS[number], case))
    assert torch.equal(out, alone(ranks, case))
    assert out.any()


def test_exact_has_the_bits_of_the_reference_backend_from_16_rows_an_expert(ranks: Ranks) -> None:
    """Its GEMMs then have the same heights on one rank and on several (docs/internals/parallel-layer.md)."""
    counts = (60, 0, 80, 52)
    given = [(ids, weights.nan_to_num()) for ids, weights in make_routing(counts)]
    case = make_case(counts, given=given, exact=True, dtype=BF16)
    assert min(torch.bincount(case.all_given[0].flatten() + 1).tolist()[1:]) >= 16
    assert torch.equal(torch.cat(outputs_of(ranks, GROUPS[4], case)), alone(ranks, case))


@pytest.mark.parametrize("exact", [False, True])
def test_the_bits_do_not_depend_on_which_rank_has_a_token(ranks: Ranks, exact: bool) -> None:
    counts = (4, 9, 0, 7)
    for out_dtype in (torch.float32, BF16):
        case = make_case(
            counts, SHARED, given=make_routing(counts), exact=exact, out_dtype=out_dtype, backend="cpu"
        )
        outputs = []
        for sizes in (counts, (20, 0, 0, 0), (0, 1, 18, 1)):
            ids, weights = (torch.split(whole, list(sizes)) for whole in case.all_given)
            tokens, given = torch.split(case.all_tokens, list(sizes)), list(zip(ids, weights, strict=True))
            outputs.append(torch.cat(outputs_of(ranks, GROUPS[4], replace(case, tokens=tokens, given=given))))
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("exact", [False, True])
def test_the_bits_do_not_depend_on_which_rank_comes_last(ranks: Ranks, exact: bool) -> None:
    case = make_case((30, 5, 0, 40), exact=exact, dtype=BF16, out_dtype=BF16)
    first = torch.cat(outputs_of(ranks, GROUPS[4], case))
    for late in (None, *range(4), None, *range(4)):
        assert torch.equal(torch.cat(outputs_of(ranks, GROUPS[4], case, late)), first), late


@pytest.mark.parametrize("exact", [False, True])
def test_all_tokens_may_choose_the_same_expert_and_none_the_others(ranks: Ranks, exact: bool) -> None:
    counts = (3, 40, 0, 1)
    given = [(torch.full((n, 3), -1, dtype=torch.int32), torch.full((n, 3), torch.nan)) for n in counts]
    for ids, weights in given:
        ids[:, 1], weights[:, 1] = 9, 0.7
    case = make_case(counts, given=given, exact=exact)
    results = [checked(result) for result in ranks.run(GROUPS[4], run_case, case)]
    assert_close(torch.cat([out for out, *_ in results]), reference_of(case))
    assert [tokens for _, tokens, _ in results] == [[0] * 10, [0] * 10, [0] * 10, [0] * 9 + [44]]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_no_tokens_at_all_and_tokens_without_experts(ranks: Ranks, number: int, exact: bool) -> None:
    nothing = outputs_of(ranks, GROUPS[number], make_case((0,) * number, SHARED, exact=exact))
    assert [out.shape for out in nothing] == [(0, SHAPE.hidden_size)] * number
    given = [(torch.full((4, 3), id_, dtype=torch.int32), torch.full((4, 3), torch.inf)) for id_ in (-1, 99)]
    case = make_case((4,) * number, given=given[:number], exact=exact)
    assert not torch.cat(outputs_of(ranks, GROUPS[number], case)).any()


@pytest.mark.parametrize("exact", [False, True])
def test_nan_stays_in_its_own_row(ranks: Ranks, exact: bool) -> None:
    case = make_case((4, 4), SHARED, exact=exact)
    case.tokens[1][2, 7] = torch.nan
    out = torch.cat(outputs_of(ranks, GROUPS[2], case))
    assert out.isnan().any(dim=1).tolist() == [False] * 6 + [True, False]
    others = torch.arange(8) != 6
    assert_close(out[others], reference_of(replace(case, tokens=[case.all_tokens[others]])))
