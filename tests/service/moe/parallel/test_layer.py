"""The parallel layer on 1 to 4 ranks, against float64, one rank's layer, and sums written out."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import Routing
from expertd.service.moe.parallel import Exchange, ExchangeError
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from tests.kernels.helpers import diff, fresh_generator
from tests.service.moe.parallel.cases import (
    Case,
    parallel_layer,
    run_alone,
    run_case,
    run_parts,
    weights_of,
)
from tests.service.moe.parallel.ranks import Ranks, ranks_of
from tests.service.moe.reference_layer import assert_close, reference_layer
from tests.service.moe.requests import layer_request, rows_of

SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=10, top_k=3)
SHARED = replace(SHAPE, num_shared_experts=2)
COUNTS = (5, 0, 17, 1)  # tokens of each rank
BY_NUMBER = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 2, 3)}
NODES = (0, 1), (2, 3)
SAME = 1e-4  # in another batch, an activation may round the other way
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(4, [*BY_NUMBER.values(), NODES[1]], timeout_seconds=20) as started:
        yield started


def _tokens(counts: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = fresh_generator()
    return [torch.randn(count, SHAPE.hidden_size, generator=generator).to(dtype) for count in counts]


def _given(counts: Sequence[int], num_experts: int = SHAPE.num_experts) -> list[tuple[Tensor, Tensor]]:
    """Random routing, in which a fifth of the slots names no expert."""
    generator, given = fresh_generator(), []
    for count in counts:
        ids = torch.rand(count, num_experts, generator=generator).argsort(dim=1)[:, : SHAPE.top_k]
        none = torch.rand(ids.shape, generator=generator) < 0.2
        weights = torch.randn(ids.shape, generator=generator)
        given.append((ids.masked_fill(none, -1).to(torch.int32), weights.masked_fill(none, torch.nan)))
    return given


def _case(counts: Sequence[int], shape: LayerShape = SHAPE, **options: Any) -> Case:
    seed = fresh_generator().initial_seed()
    dtype = options.pop("dtype", torch.float32)
    return Case(shape, seed, _tokens(counts, dtype), **options)


def _outputs(ranks: Ranks, group: Sequence[int], case: Case, late: int | None = None) -> list[Tensor]:
    results = ranks.run(group, run_case, case, late=late)
    return [_result(result)[0] for result in results]


def _result(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result


def _alone(ranks: Ranks, case: Case) -> Tensor:
    """One rank's layer, in the process of a rank: it has one thread, as they have."""
    out: Tensor = _result(ranks.run((0,), run_alone, case)[0])
    return out


def _reference(case: Case, **options: Any) -> Tensor:
    weights = weights_of(case.shape, case.seed)
    if case.given is not None:
        options["topk_ids"], options["topk_weights"] = case.all_given
    shared = case.shape.num_shared_experts
    return reference_layer(
        case.all_tokens, weights, SHAPE.top_k, num_shared_experts=shared,
        held_experts=case.shape.held_experts, **options,
    )  # fmt: skip


@pytest.mark.parametrize("number", BY_NUMBER)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(BF16, BF16), (torch.float16, torch.float16), (torch.float32, torch.float32), (BF16, torch.float32)],
)
def test_the_layer_matches_the_reference(
    ranks: Ranks, number: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    case = _case(COUNTS[-number:], SHARED, dtype=dtype, out_dtype=out_dtype)
    outputs = _outputs(ranks, BY_NUMBER[number], case)
    assert [(len(out), out.dtype) for out in outputs] == [(n, out_dtype) for n in COUNTS[-number:]]
    assert_close(torch.cat(outputs), _reference(case))


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("out_dtype", [torch.float32, BF16, torch.float16])
def test_ranks_are_added_in_their_order_then_shared_experts(
    ranks: Ranks, number: int, out_dtype: torch.dtype
) -> None:
    counts = COUNTS[:number]
    case = _case(counts, SHARED, given=_given(counts), out_dtype=out_dtype, backend="row by row")
    parts = _result(ranks.run((0,), run_parts, case, number)[0])
    back = BF16 if out_dtype == BF16 else torch.float32
    expected = torch.zeros_like(parts[0])
    for part in parts[:number]:
        expected += part.to(back)
    for part in parts[number:]:
        expected += part
    assert torch.equal(torch.cat(_outputs(ranks, BY_NUMBER[number], case)), expected.to(out_dtype))


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16])
def test_the_difference_from_one_rank_is_within_the_rounding_of_combine(
    ranks: Ranks, out_dtype: torch.dtype
) -> None:
    counts = (6, 0, 11, 3)
    case = _case(counts, SHARED, given=_given(counts), out_dtype=out_dtype, backend="row by row")
    out = torch.cat(_outputs(ranks, BY_NUMBER[4], case))
    expected = _alone(ranks, replace(case, out_dtype=torch.float32))
    # Of each slot: its expert alone.
    sizes = torch.zeros_like(expected)
    ids, weights = case.all_given
    for slot in range(SHAPE.top_k):
        only = torch.full_like(ids, -1)
        only[:, slot] = ids[:, slot]
        one = replace(case, shape=SHAPE, tokens=[case.all_tokens], given=[(only, weights)])
        sizes += _alone(ranks, replace(one, out_dtype=torch.float32)).abs()
    parts = _result(ranks.run((0,), run_parts, case, 4)[0])
    bound = (SHAPE.top_k + 4 + 2) * 2**-23 * (sizes + sum(part.abs() for part in parts[4:]))
    if out_dtype == BF16:
        bound += 2**-8 * (expected.abs() + sum(part.abs() for part in parts[:4]))
    assert bool(((out.float() - expected).abs() <= bound).all())


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(torch.float32, torch.float32), (BF16, BF16), (torch.float16, torch.float32)]
)
def test_exact_has_the_bits_of_one_rank(
    ranks: Ranks, number: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    counts = COUNTS[-number:]
    case = _case(
        counts, SHARED, given=_given(counts), dtype=dtype, out_dtype=out_dtype,
        backend="row by row", exact=True,
    )  # fmt: skip
    out = torch.cat(_outputs(ranks, BY_NUMBER[number], case))
    assert torch.equal(out, _alone(ranks, case))
    assert out.any()


def test_exact_has_the_bits_of_the_reference_backend_from_16_rows_an_expert(ranks: Ranks) -> None:
    """Then its GEMMs have the same heights on one rank and on several; see `docs/parallel.md`."""
    counts = (60, 0, 80, 52)
    given = [(ids, weights.nan_to_num()) for ids, weights in _given(counts)]
    case = _case(counts, given=given, exact=True, dtype=BF16)
    assert min(torch.bincount(case.all_given[0].flatten() + 1).tolist()[1:]) >= 16
    assert torch.equal(torch.cat(_outputs(ranks, BY_NUMBER[4], case)), _alone(ranks, case))


@pytest.mark.parametrize("exact", [False, True])
def test_the_bits_do_not_depend_on_which_rank_has_a_token(ranks: Ranks, exact: bool) -> None:
    counts = (4, 9, 0, 7)
    for out_dtype in (torch.float32, BF16):
        case = _case(
            counts, SHARED, given=_given(counts), exact=exact, out_dtype=out_dtype, backend="row by row"
        )
        outputs = []
        for sizes in (counts, (20, 0, 0, 0), (0, 1, 18, 1)):
            ids, weights = (whole.split(sizes) for whole in case.all_given)
            tokens, given = case.all_tokens.split(sizes), list(zip(ids, weights, strict=True))
            outputs.append(
                torch.cat(_outputs(ranks, BY_NUMBER[4], replace(case, tokens=tokens, given=given)))
            )
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("exact", [False, True])
def test_the_bits_do_not_depend_on_which_rank_comes_last(ranks: Ranks, exact: bool) -> None:
    case = _case((30, 5, 0, 40), exact=exact, dtype=BF16, out_dtype=BF16)
    first = torch.cat(_outputs(ranks, BY_NUMBER[4], case))
    for late in (None, *range(4), None, *range(4)):
        assert torch.equal(torch.cat(_outputs(ranks, BY_NUMBER[4], case, late)), first), late


@pytest.mark.parametrize("exact", [False, True])
def test_all_tokens_may_choose_the_same_expert_and_none_the_others(ranks: Ranks, exact: bool) -> None:
    counts = (3, 40, 0, 1)
    given = [(torch.full((n, 3), -1, dtype=torch.int32), torch.full((n, 3), torch.nan)) for n in counts]
    for ids, weights in given:
        ids[:, 1], weights[:, 1] = 9, 0.7
    case = _case(counts, given=given, exact=exact)
    results = [_result(result) for result in ranks.run(BY_NUMBER[4], run_case, case)]
    assert_close(torch.cat([out for out, *_ in results]), _reference(case))
    assert [tokens for _, tokens, _ in results] == [[0] * 10, [0] * 10, [0] * 10, [0] * 9 + [44]]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_no_tokens_at_all_and_tokens_without_experts(ranks: Ranks, number: int, exact: bool) -> None:
    nothing = _outputs(ranks, BY_NUMBER[number], _case((0,) * number, SHARED, exact=exact))
    assert [out.shape for out in nothing] == [(0, SHAPE.hidden_size)] * number
    given = [(torch.full((4, 3), id_, dtype=torch.int32), torch.full((4, 3), torch.inf)) for id_ in (-1, 99)]
    case = _case((4,) * number, given=given[:number], exact=exact)
    assert not torch.cat(_outputs(ranks, BY_NUMBER[number], case)).any()


@pytest.mark.parametrize("exact", [False, True])
def test_nan_stays_in_its_own_row(ranks: Ranks, exact: bool) -> None:
    case = _case((4, 4), SHARED, exact=exact)
    case.tokens[1][2, 7] = torch.nan
    out = torch.cat(_outputs(ranks, BY_NUMBER[2], case))
    assert out.isnan().any(dim=1).tolist() == [False] * 6 + [True, False]
    others = torch.arange(8) != 6
    assert_close(out[others], _reference(replace(case, tokens=[case.all_tokens[others]])))


@pytest.mark.parametrize("exact", [False, True])
def test_each_rank_counts_the_tokens_of_its_own_experts(ranks: Ranks, exact: bool) -> None:
    counts = (5, 0, 17)
    case = _case(counts, SHARED, given=_given(counts), exact=exact)
    results = [_result(result) for result in ranks.run(BY_NUMBER[3], run_case, case)]
    whole = torch.bincount(case.all_given[0].flatten() + 1, minlength=11)[1:].tolist()
    parts = whole[:4], whole[4:7], whole[7:]
    assert [tokens for _, tokens, _ in results] == [
        [*parts[0], *[0] * 6], [*[0] * 4, *parts[1], *[0] * 3], [*[0] * 7, *parts[2]]
    ]  # fmt: skip
    shared = [offsets[-3:].diff().tolist() for *_, offsets in results]
    assert shared == [[count, count] for count in counts]


def test_a_layer_that_holds_a_part_of_the_experts_is_split(ranks: Ranks) -> None:
    shape = replace(SHARED, local_experts=range(3, 8))
    case = _case((5, 12), shape, given=_given((5, 12)))
    results = [_result(result) for result in ranks.run(BY_NUMBER[2], run_case, case)]
    assert_close(torch.cat([out for out, *_ in results]), _reference(case))
    totals = torch.tensor([tokens for _, tokens, _ in results]).sum(0)
    whole = torch.bincount(case.all_given[0].flatten() + 1, minlength=11)[1:]
    assert totals.tolist() == [0, 0, 0, *whole[3:8].tolist(), 0, 0]


def test_the_rule_of_routing_is_used(ranks: Ranks) -> None:
    rule = Routing("sigmoid", routed_scaling_factor=2.5, num_expert_groups=5, topk_group=2)
    case = _case((9, 8), routing=rule)
    assert diff(torch.cat(_outputs(ranks, BY_NUMBER[2], case)), _alone(ranks, case)) < SAME


def test_two_nodes_may_serve_a_layer_each(ranks: Ranks) -> None:
    """Two groups on loopback, at the same time."""
    cases = [_case((3, 8), SHARED), _case((6, 1), SHARED)]
    for node, case in zip(NODES, cases, strict=True):
        for rank in node:
            ranks.begin(rank, node, run_case, case)
    for node, case in zip(NODES, cases, strict=True):
        outputs = [_result(result)[0] for result in ranks.finish(node)]
        assert_close(torch.cat(outputs), _reference(case))


class _Counting:
    """Counts the rows that a dispatch brings."""

    def __init__(self, exchange: Exchange) -> None:
        self.rank, self.num_ranks, self.rows = exchange.rank, exchange.num_ranks, 0
        self._exchange = exchange

    def dispatch(self, *arguments: Any) -> Any:
        arrived = self._exchange.dispatch(*arguments)
        self.rows += len(arrived.hidden_states)
        return arrived


def _arrived(exchange: Exchange, case: Case) -> int:
    counting: Any = _Counting(exchange)
    run_case(counting, case)
    return int(counting.rows)


def test_a_token_goes_once_to_each_rank_that_has_one_of_its_experts(ranks: Ranks) -> None:
    ids = torch.tensor([[0, 1, 2], [0, 9, 1], [-1, 3, -1], [-1, -1, -1]], dtype=torch.int32)
    given = [(ids, torch.ones(4, 3)), (ids[:2], torch.ones(2, 3)), (ids[:0], torch.ones(0, 3))]
    for exact in (False, True):
        case = _case((4, 2, 0), given=given, exact=exact)  # ranks hold experts 0-3, 4-6 and 7-9
        assert ranks.run(BY_NUMBER[3], _arrived, case) == [3 + 2, 0, 1 + 1]


def _step(exchange: Exchange, case: Case, request: LayerRequest) -> tuple[Tensor, list[int]]:
    runner = LayerRunner(parallel_layer(exchange, case), "cpu")
    result = runner.run([request])
    return rows_of(result.outputs[0], "FP32", SHAPE.hidden_size), list(result.count_tokens())


def test_a_runner_runs_steps_of_it(ranks: Ranks) -> None:
    case = _case((6, 4), dtype=BF16)
    for rank, tokens in enumerate(case.tokens):
        ranks.begin(rank, (0, 1), _step, case, layer_request(tokens))
    results = [_result(result) for result in ranks.finish((0, 1))]
    assert_close(torch.cat([out for out, _ in results]), _reference(case))
    assert sum(sum(tokens) for _, tokens in results) == 10 * SHAPE.top_k


def test_more_ranks_than_experts_are_refused(ranks: Ranks) -> None:
    shape = replace(SHAPE, num_experts=3, local_experts=None)
    for error in ranks.run(BY_NUMBER[4], run_case, _case(COUNTS, shape)):
        assert isinstance(error, ValueError)
        assert str(error) == "num_ranks: expected 1 to 3, one expert for each, got 4"


def _bad_call(exchange: Exchange, case: Case, bad: int, arguments: dict[str, Any]) -> None:
    layer = parallel_layer(exchange, case)
    given: dict[str, Any] = {"hidden_states": case.tokens[exchange.rank]}
    layer(**given | (arguments if exchange.rank == bad else {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": torch.zeros(2, 128)}, r"hidden_states shape: expected [T, 256], got (2, 128)"),
        ({"topk_ids": torch.zeros(8, 3)}, "topk_ids and topk_weights: expected both or neither, got one"),
        ({"num_sms": 0}, "num_sms: expected None or at least 1, got 0"),
        ({"out": torch.zeros(7, 256)}, "out: expected a contiguous (8, 256), got (7, 256), (256, 1)"),
        (
            {"out": torch.zeros(8, 256).double()},
            "out dtype: expected a float dtype",
        ),
        ({"offsets": torch.zeros(4)}, "offsets: expected int32 (11,), got torch.float32 (4,)"),
    ],
)
def test_wrong_arguments_of_one_rank_are_refused_on_all(
    ranks: Ranks, arguments: dict[str, Any], message: str
) -> None:
    case = _case((8, 8, 8))
    others, bad = "dispatch: expected valid arguments on all ranks, got an error on rank 1", ValueError
    errors = ranks.run(BY_NUMBER[3], _bad_call, case, 1, arguments)
    assert [str(error) for error in errors] == [others, message, others]
    assert [type(error) for error in errors] == [ExchangeError, bad, ExchangeError]
    assert_close(torch.cat(_outputs(ranks, BY_NUMBER[3], case)), _reference(case))


def test_dtypes_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    case = _case((8, 8))
    errors = ranks.run(BY_NUMBER[2], _bad_call, case, 1, {"hidden_states": torch.zeros(8, 256, dtype=BF16)})
    expected = (
        "dispatch: expected one dtype and size on all ranks, got "
        "rank 0: torch.float32 tokens in 1048 bytes, torch.float32 rows, "
        "rank 1: torch.bfloat16 tokens in 536 bytes, torch.float32 rows"
    )
    assert [str(error) for error in errors] == [expected] * 2
    assert_close(torch.cat(_outputs(ranks, BY_NUMBER[2], case)), _reference(case))
