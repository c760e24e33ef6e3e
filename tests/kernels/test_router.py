"""The routing rules against the families' routers in transformers, and cases that those leave undefined."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import Routing, choose_experts, resolve_backend
from tests.families import FAMILIES, FamilyCase, quiet_transformers
from tests.kernels.helpers import fresh_generator
from tests.kernels.reference_routing import reference_routing

HIDDEN, EXPERTS, TOP_K = 96, 32, 4
CASES = FAMILIES | {
    "deepseek-v3, eight groups": FAMILIES["deepseek-v3"].with_settings(
        Routing("sigmoid", True, 2.5, 8, 3), n_group=8, topk_group=3
    ),
    "deepseek-v3, eight groups, as they are": FAMILIES["deepseek-v3"].with_settings(
        Routing("sigmoid", False, 2.5, 8, 3), n_group=8, topk_group=3, norm_topk_prob=False
    ),
    "glm-4.5-air": FAMILIES["glm-4.5"].with_settings(Routing("sigmoid"), routed_scaling_factor=1.0),
}


def theirs(case: FamilyCase) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """The family's router: (hidden, weight, bias) to (logits, weights, ids)."""
    with quiet_transformers():
        config = case.config(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
        module = config.model_type
        modeling = import_module(f"transformers.models.{module}.modeling_{module}")
    name = next(name for name in vars(modeling) if name.lower() == f"{case.prefix}TopKRouter".lower())
    router = getattr(modeling, name)(config)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        router.weight.data = weight
        if module == "minimax_m2":
            return router(hidden, bias)
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias = bias
        return router(hidden)

    return run


@pytest.mark.thorough  # the layers of checkpoints are compared with transformers, too
@torch.no_grad()
@pytest.mark.parametrize("family", CASES)
def test_a_family_routes_as_in_transformers(family: str) -> None:
    case = CASES[family]
    generator = fresh_generator()
    hidden = torch.randn(500, HIDDEN, generator=generator)
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator) / HIDDEN**0.5
    bias = torch.randn(EXPERTS, generator=generator) - 1  # large enough to affect choices, mostly negative
    logits, their_weights, their_ids = theirs(case)(hidden, weight, bias)
    assert logits.shape == (500, EXPERTS)
    chosen_by_bias = bias if case.routing.scoring_func == "sigmoid" else None
    ids, weights = choose_experts(logits, chosen_by_bias, TOP_K, case.routing)
    ours, expected = torch.zeros(500, EXPERTS), torch.zeros(500, EXPERTS)
    ours.scatter_(1, ids.long(), weights)
    expected.scatter_(1, their_ids, their_weights)
    assert torch.equal(ours != 0, expected != 0)  # as sets
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def test_transformers_does_not_mistake_our_kernels_for_hugging_faces() -> None:
    """It finds Hugging Face's `kernels` by the import name, which our folder shares."""
    assert import_module("kernels").__file__ is not None
    with quiet_transformers():
        assert not import_module("transformers.utils").is_kernels_available()


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_matches_the_reference(renormalize: bool) -> None:
    generator = fresh_generator()
    hidden, router = torch.randn(9, 128, generator=generator), torch.randn(20, 128, generator=generator) / 11
    topk_ids, topk_weights = choose_experts(hidden @ router.t(), None, 4, Routing(renormalize=renormalize))
    assert topk_ids.dtype == torch.int32
    assert topk_weights.dtype == torch.float32
    assert topk_weights.is_contiguous()
    for token in range(9):
        expected = reference_routing(hidden[token], router, 4, renormalize)
        assert topk_ids[token].tolist() == list(expected)
        assert topk_weights[token].tolist() == pytest.approx(list(expected.values()), rel=1e-4)


def test_equal_scores_go_to_the_lower_expert() -> None:
    logits = torch.zeros(300, 50)
    logits[:, 40] = 1
    topk_ids, topk_weights = choose_experts(logits, None, 4, Routing())
    assert topk_ids.tolist() == [[40, 0, 1, 2]] * 300
    assert torch.allclose(topk_weights.sum(1), torch.ones(300))


def test_a_token_of_nan_gets_different_experts_and_nan_weights() -> None:
    logits = torch.zeros(2, 8)
    logits[1] = torch.nan
    topk_ids, topk_weights = choose_experts(logits, None, 3, Routing())
    assert len(set(topk_ids[1].tolist())) == 3
    assert topk_weights[0].isfinite().all()
    assert topk_weights[1].isnan().all()


def test_equal_groups_go_to_the_lower_group() -> None:
    ids, weights = choose_experts(
        torch.zeros(3, 12), None, 4, Routing("sigmoid", num_expert_groups=4, topk_group=2)
    )
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.tolist() == [[0.25] * 4] * 3


def test_no_expert_of_another_group_is_chosen() -> None:
    """Expert 11 is the best of all, but the only good one in its group: two good ones in another beat it."""
    logits = torch.full((1, 12), -5.0)
    logits[0, [0, 1, 4, 5]], logits[0, 11] = 1.0, 2.0
    ids, _ = choose_experts(logits, None, 4, Routing("sigmoid", num_expert_groups=3, topk_group=2))
    assert sorted(ids[0].tolist()) == [0, 1, 4, 5]


def test_groups_of_one_expert() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    ids, _ = choose_experts(logits, None, 2, Routing("sigmoid", num_expert_groups=4, topk_group=2))
    assert ids.tolist() == [[0, 2]]


def test_the_bias_affects_the_choice_but_not_the_weights() -> None:
    bias = torch.tensor([0.0, 0.0, 9.0])
    ids, weights = choose_experts(
        torch.zeros(1, 3), bias, 1, Routing("sigmoid", renormalize=False, routed_scaling_factor=3.0)
    )
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[1.5]])


def test_scores_that_are_all_zero_give_zeros() -> None:
    _, weights = choose_experts(torch.full((1, 4), -200.0), None, 2, Routing("sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Routing("tanh"),  # type: ignore[arg-type]
            "scoring_func: expected 'softmax', 'sigmoid', 'sqrtsoftplus' or 'sparsemixer', got 'tanh'",
        ),
        (
            lambda: Routing(group_score="sum"),  # type: ignore[arg-type]
            "group_score: expected 'best_two' or 'best', got 'sum'",
        ),
        (
            lambda: Routing(num_expert_groups=4, topk_group=5),
            r"topk_group: expected 1 to num_expert_groups \(4\), got 5",
        ),
        (lambda: Routing(num_expert_groups=0), r"topk_group: expected 1 to num_expert_groups \(0\), got 1"),
        (
            lambda: Routing(num_expert_groups=3).check(8, 1),
            r"num_experts: expected a multiple of num_expert_groups \(3\), got 8",
        ),
        (
            lambda: Routing(num_expert_groups=4, topk_group=2).check(8, 5),
            "top_k: expected at most the 4 experts of .*, got 5",
        ),
    ],
)
def test_impossible_rules_are_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_padding_has_no_experts() -> None:
    generator = fresh_generator()
    hidden, router = torch.randn(9, HIDDEN, generator=generator), torch.randn(EXPERTS, HIDDEN)
    backend = resolve_backend("reference")
    ids, weights = backend.route(hidden, router, None, TOP_K, Routing())
    padded_ids, padded_weights = backend.route(
        hidden, router, None, TOP_K, Routing(), torch.tensor(4, dtype=torch.int32)
    )
    assert torch.equal(padded_ids[:4], ids[:4])
    assert (padded_ids[4:] == -1).all()
    assert torch.equal(padded_weights, weights)
