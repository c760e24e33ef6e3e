"""How the layer is called: counts, what is sent, steps of a runner, and wrong arguments."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import Routing
from expertd.service.device import device_of
from expertd.service.moe.parallel import Exchange, ExchangeError
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from tests.kernels.helpers import diff
from tests.service.moe.parallel.calls import (
    BF16,
    COUNTS,
    GROUPS,
    NODES,
    SAME,
    SHAPE,
    SHARED,
    alone,
    checked,
    make_case,
    make_routing,
    outputs_of,
    reference_of,
)
from tests.service.moe.parallel.cases import Case, parallel_layer, run_case
from tests.service.moe.parallel.ranks import Ranks
from tests.service.moe.reference_layer import assert_close
from tests.service.moe.requests import layer_request, rows_of


@pytest.mark.parametrize("exact", [False, True])
def test_each_rank_counts_the_tokens_of_its_own_experts(ranks: Ranks, exact: bool) -> None:
    counts = (5, 0, 17)
    case = make_case(counts, SHARED, given=make_routing(counts), exact=exact)
    results = [checked(result) for result in ranks.run(GROUPS[3], run_case, case)]
    whole = torch.bincount(case.all_given[0].flatten() + 1, minlength=11)[1:].tolist()
    parts = whole[:4], whole[4:7], whole[7:]
    assert [tokens for _, tokens, _ in results] == [
        [*parts[0], *[0] * 6], [*[0] * 4, *parts[1], *[0] * 3], [*[0] * 7, *parts[2]]
    ]  # fmt: skip


def test_a_layer_that_holds_a_part_of_the_experts_is_split(ranks: Ranks) -> None:
    shape = replace(SHARED, local_experts=range(3, 8))
    case = make_case((5, 12), shape, given=make_routing((5, 12)))
    results = [checked(result) for result in ranks.run(GROUPS[2], run_case, case)]
    assert_close(torch.cat([out for out, *_ in results]), reference_of(case))
    totals = torch.tensor([tokens for _, tokens, _ in results]).sum(0)
    whole = torch.bincount(case.all_given[0].flatten() + 1, minlength=11)[1:]
    assert totals.tolist() == [0, 0, 0, *whole[3:8].tolist(), 0, 0]


def test_the_rule_of_routing_is_used(ranks: Ranks) -> None:
    rule = Routing("sigmoid", routed_scaling_factor=2.5, num_expert_groups=5, topk_group=2)
    case = make_case((9, 8), routing=rule)
    assert diff(torch.cat(outputs_of(ranks, GROUPS[2], case)), alone(ranks, case)) < SAME


def test_two_nodes_may_serve_a_layer_each(ranks: Ranks) -> None:
    """Two groups on loopback, at the same time."""
    cases = [make_case((3, 8), SHARED), make_case((6, 1), SHARED)]
    for node, case in zip(NODES, cases, strict=True):
        for rank in node:
            ranks.begin(rank, node, run_case, case)
    for node, case in zip(NODES, cases, strict=True):
        outputs = [checked(result)[0] for result in ranks.finish(node)]
        assert_close(torch.cat(outputs), reference_of(case))


FLOATS = "torch.float32 or torch.bfloat16 or torch.float16"


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
        case = make_case((4, 2, 0), given=given, exact=exact)  # ranks hold experts 0-3, 4-6 and 7-9
        assert ranks.run(GROUPS[3], _arrived, case) == [3 + 2, 0, 1 + 1]


def _step(exchange: Exchange, case: Case, request: LayerRequest) -> tuple[Tensor, list[int]]:
    runner = LayerRunner(parallel_layer(exchange, case), device_of("cpu"))
    result = runner.run([request])
    return rows_of(result.outputs[0], "FP32", SHAPE.hidden_size), list(result.count_tokens())


def test_a_runner_runs_steps_of_it(ranks: Ranks) -> None:
    case = make_case((6, 4), dtype=BF16)
    for rank, tokens in enumerate(case.tokens):
        ranks.begin(rank, (0, 1), _step, case, layer_request(tokens))
    results = [checked(result) for result in ranks.finish((0, 1))]
    assert_close(torch.cat([out for out, _ in results]), reference_of(case))
    assert sum(sum(tokens) for _, tokens in results) == 10 * SHAPE.top_k


def test_more_ranks_than_experts_are_refused(ranks: Ranks) -> None:
    shape = replace(SHAPE, num_experts=3, local_experts=None)
    for error in ranks.run(GROUPS[4], run_case, make_case(COUNTS, shape)):
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
            f"out dtype: expected {FLOATS}, got torch.float64",
        ),
        ({"offsets": torch.zeros(4)}, "offsets: expected int32 (11,), got torch.float32 (4,)"),
    ],
)
def test_wrong_arguments_of_one_rank_are_refused_on_all(
    ranks: Ranks, arguments: dict[str, Any], message: str
) -> None:
    case = make_case((8, 8, 8))
    others, bad = "dispatch: expected valid arguments on all ranks, got an error on rank 1", ValueError
    errors = ranks.run(GROUPS[3], _bad_call, case, 1, arguments)
    assert [str(error) for error in errors] == [others, message, others]
    assert [type(error) for error in errors] == [ExchangeError, bad, ExchangeError]
    assert_close(torch.cat(outputs_of(ranks, GROUPS[3], case)), reference_of(case))


def test_dtypes_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    case = make_case((8, 8))
    errors = ranks.run(GROUPS[2], _bad_call, case, 1, {"hidden_states": torch.zeros(8, 256, dtype=BF16)})
    expected = (
        "dispatch: expected one dtype and size on all ranks, got "
        "rank 0: torch.float32 tokens in 1048 bytes, torch.float32 rows, "
        "rank 1: torch.bfloat16 tokens in 536 bytes, torch.float32 rows"
    )
    assert [str(error) for error in errors] == [expected] * 2
    assert_close(torch.cat(outputs_of(ranks, GROUPS[2], case)), reference_of(case))
