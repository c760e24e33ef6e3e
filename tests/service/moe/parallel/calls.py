"""Random cases, and their calls on ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from expertd.service.moe.shape import LayerShape
from tests.kernels.helpers import fresh_generator
from tests.service.moe.parallel.cases import Case, run_alone, run_case, weights_of
from tests.service.moe.parallel.ranks import Ranks
from tests.service.moe.reference_layer import reference_layer

SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=10, top_k=3)
SHARED = replace(SHAPE, num_shared_experts=2)
COUNTS = (5, 0, 17, 1)  # tokens of each rank
GROUPS = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 2, 3)}
NODES = (0, 1), (2, 3)
SAME = 1e-4  # in another batch, an activation may round the other way
BF16 = torch.bfloat16


def make_tokens(
    counts: Sequence[int], dtype: torch.dtype = torch.float32, hidden_size: int = SHAPE.hidden_size
) -> list[Tensor]:
    generator = fresh_generator()
    return [torch.randn(count, hidden_size, generator=generator).to(dtype) for count in counts]


def make_routing(counts: Sequence[int], num_experts: int = SHAPE.num_experts) -> list[tuple[Tensor, Tensor]]:
    """Random routing, in which a fifth of the slots names no expert."""
    generator, given = fresh_generator(), []
    for count in counts:
        ids = torch.rand(count, num_experts, generator=generator).argsort(dim=1)[:, : SHAPE.top_k]
        none = torch.rand(ids.shape, generator=generator) < 0.2
        weights = torch.randn(ids.shape, generator=generator)
        given.append((ids.masked_fill(none, -1).to(torch.int32), weights.masked_fill(none, torch.nan)))
    return given


def make_case(counts: Sequence[int], shape: LayerShape = SHAPE, **options: Any) -> Case:
    seed = fresh_generator().initial_seed()
    dtype = options.pop("dtype", torch.float32)
    return Case(shape, seed, make_tokens(counts, dtype, shape.hidden_size), **options)


def outputs_of(ranks: Ranks, group: Sequence[int], case: Case, late: int | None = None) -> list[Tensor]:
    results = ranks.run(group, run_case, case, late=late)
    return [checked(result)[0] for result in results]


def checked(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result


def alone(ranks: Ranks, case: Case) -> Tensor:
    """One rank's layer, in the process of a rank: it has one thread, as they have."""
    out: Tensor = checked(ranks.run((0,), run_alone, case)[0])
    return out


def reference_of(case: Case, **options: Any) -> Tensor:
    weights = weights_of(case.shape, case.seed)
    if case.given is not None:
        options["topk_ids"], options["topk_weights"] = case.all_given
    shared = case.shape.num_shared_experts
    return reference_layer(
        case.all_tokens, weights, SHAPE.top_k, num_shared_experts=shared,
        held_experts=case.shape.held_experts, **options,
    )  # fmt: skip
