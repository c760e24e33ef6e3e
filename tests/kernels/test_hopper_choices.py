"""What the Hopper backend leaves to PyTorch, because its kernels would compute something else."""

from typing import Any

import pytest
import torch

from expertd.kernels import Routing, choose_experts, unpermute_rows
from expertd.kernels.backends.hopper import backend as hopper
from expertd.kernels.backends.hopper.backend import HopperBackend
from expertd.kernels.backends.hopper.route_tokens import can_route
from tests.kernels.helpers import fresh_generator

OTHER_RULES = [
    Routing("sqrtsoftplus"),
    Routing("sparsemixer"),
    Routing("sigmoid", num_expert_groups=4, topk_group=2, group_score="best"),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched: none of them runs."""
    made: list[str] = []

    def route(*_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made.append("route_tokens")
        return torch.zeros(0), torch.zeros(0)

    monkeypatch.setattr(hopper, "route_tokens", route)
    monkeypatch.setattr(hopper, "unpermute_rows", lambda *_: made.append("unpermute_rows"))
    monkeypatch.setattr(hopper, "_current", lambda tensor, name: 0)
    monkeypatch.setattr(hopper, "current_stream", lambda device: None)
    return made


@pytest.mark.parametrize("routing", OTHER_RULES, ids=lambda routing: routing.scoring_func)
def test_rules_of_no_kernel_run_in_pytorch(routing: Routing, launched: list[str]) -> None:
    logits = torch.randn(5, 16, generator=fresh_generator())
    assert not can_route(16, 4, routing)
    for result, expected in zip(
        HopperBackend().choose_experts(logits, None, 4, routing),
        choose_experts(logits, None, 4, routing),
        strict=True,
    ):
        assert torch.equal(result, expected)
    assert launched == []


def test_the_other_rules_run_in_the_kernel(launched: list[str]) -> None:
    HopperBackend().choose_experts(torch.zeros(5, 16), None, 4, Routing("sigmoid"))
    assert launched == ["route_tokens"]
    assert can_route(16, 4, Routing(num_expert_groups=4, topk_group=2))
    assert not can_route(64, 33, Routing())


@pytest.mark.parametrize(
    ("h", "num_slots", "index", "out_dtype", "kernels"),
    [
        (128, 2, torch.int32, torch.float32, ["unpermute_rows"]),
        (132, 2, torch.int32, torch.float32, []),
        (128, 0, torch.int32, torch.float32, []),
        (128, 2, torch.int64, torch.float32, []),
        (128, 2, torch.int32, torch.float64, []),
    ],
)
def test_sums_that_the_kernel_lacks_run_in_pytorch(
    h: int,
    num_slots: int,
    index: torch.dtype,
    out_dtype: torch.dtype,
    kernels: list[str],
    launched: list[str],
) -> None:
    generator = fresh_generator()
    rows = torch.randn(6, h, generator=generator).to(torch.bfloat16)
    inverse = torch.randperm(3 * num_slots, generator=generator).view(3, num_slots).to(index)
    weights = torch.randn(3, num_slots, generator=generator)
    out = torch.zeros(3, h, dtype=out_dtype)
    HopperBackend().unpermute(rows, inverse, weights, out)
    assert launched == kernels
    if not kernels:
        assert torch.equal(out, unpermute_rows(rows, inverse, weights).to(out_dtype))
