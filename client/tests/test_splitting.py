"""Which parts make up a layer whose experts are divided, and how their outputs add up; without servers."""

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from expertd_client import InvalidRequestError
from expertd_client.calls import LayerCall, layer_call
from expertd_client.splitting import ExpertOwner, _cover, _encoded, split
from expertd_client.steps import Steps, run

X = np.random.default_rng(3).standard_normal((2, 4), dtype=np.float32)


def test_parts_of_a_layer_are_found() -> None:
    """By any division; with parts that overlap, those that fit; None without."""
    for _ in range(200):
        total = random.randint(1, 12)
        cuts = sorted({0, total, *random.choices(range(total + 1), k=3)})
        parts = [frozenset(range(first, last)) for first, last in itertools.pairwise(cuts)]
        others = [frozenset(random.sample(range(total), random.randint(1, total))) for _ in range(3)]
        found = _cover(total, random.sample([*parts, *others], len(parts) + 3))
        assert found is not None
        assert sorted(expert for part in found for expert in part) == list(range(total))
        missing = random.choice(parts)
        assert _cover(total + 1, parts) is None
        if len(parts) > 1:
            assert _cover(total, [part for part in parts if part != missing]) is None


def experts_of(values: Any, ids: Any, weights: Any, held: frozenset[int]) -> Any:
    """An expert multiplies by its number + 1."""
    factors = [
        sum((expert + 1) * weight for expert, weight in zip(row, weighting, strict=True) if expert in held)
        for row, weighting in zip(ids.tolist(), weights.tolist(), strict=True)
    ]
    return values * np.array(factors, np.float32)[:, None]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "torch"])
def test_the_sum_of_parts(dtype: str) -> None:
    rng = np.random.default_rng()
    parts = [frozenset({0, 1}), frozenset({2, 3, 4}), frozenset({5}), frozenset({6, 7})]
    x = rng.standard_normal((7, 16), dtype=np.float32)
    ids = np.argsort(rng.random((7, 6)), axis=1)[:, :2].astype(np.int32)  # none of the last part's
    weights = rng.random((7, 2), dtype=np.float32)
    asked: list[int] = []

    def owner(held: frozenset[int]) -> ExpertOwner:
        def answer(part: LayerCall) -> Steps[None]:
            yield from ()
            given = [np.asarray(tensor.value) for tensor in part.inputs]
            asked.append(len(given[0]))
            assert np.isin(given[1], sorted(held)).any(1).all()
            out = experts_of(given[0], given[1], given[2], held)
            part.output.store(np.ascontiguousarray(out.astype(np.float32)).view(np.uint8).reshape(-1))

        return ExpertOwner(held, False, answer)

    exact = experts_of(x.astype(np.float64), ids, weights, frozenset(range(8)))
    if dtype == "torch":
        tensors = (torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights))
        call = layer_call("m", *tensors, "bfloat16")
    else:
        call = layer_call("m", x, ids, weights, output_dtype=dtype)
    run(split(call, [owner(held) for held in parts]))
    out = call.output.result()
    if dtype == "uint16":
        out = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).float().numpy()
    elif dtype == "torch":
        assert out.dtype == torch.bfloat16
        out = out.float().numpy()
    bits = {"float32": 22, "float16": 10}.get(dtype, 7)
    np.testing.assert_allclose(out, exact, rtol=2.0**-bits, atol=1e-6)
    assert len(asked) <= 3
    assert sum(asked) == sum(np.isin(ids, sorted(held)).any(1).sum() for held in parts)


@pytest.mark.parametrize("ids", [[[9, 9], [0, 1]], [[-1, 2**40], [9, -1]], [[], []]], ids=str)
def test_no_token_is_left_out(ids: Any) -> None:
    """Of those that name nobody's experts, a server judges."""
    asked: list[int] = []

    def refuse(part: LayerCall) -> Steps[None]:
        yield from ()
        asked.append(part.shape[0])
        raise InvalidRequestError("topk_ids: wrong", 400)

    owners = [ExpertOwner(frozenset(held), False, refuse) for held in ({0, 1}, {2, 3})]
    given = np.array(ids, np.int64)
    with pytest.raises(InvalidRequestError):
        run(split(layer_call("m", X, given, np.ones(given.shape, np.float32)), owners))
    assert asked == [2]


def test_the_sum_of_parts_is_in_float32_whatever_torch_has_as_default() -> None:
    def answer(part: LayerCall) -> Steps[None]:
        yield from ()
        part.output.store(np.full(part.shape, 1 + 2.0**-20, np.float32).view(np.uint8).reshape(-1))

    torch.set_default_dtype(torch.bfloat16)
    try:
        ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        call = layer_call("m", torch.from_numpy(X), ids, torch.ones(2, 2, dtype=torch.float32))
        run(split(call, [ExpertOwner(frozenset(held), False, answer) for held in ({0, 2}, {1})]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert call.output.result().tolist() == [[2 + 2.0**-19] * 4, [1 + 2.0**-20] * 4]


def test_bfloat16_is_rounded_as_torch_does() -> None:
    values = np.random.default_rng().integers(0, 2**32, 100_000, np.uint64).astype(np.uint32).view(np.float32)
    values = np.concatenate(
        [values, np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38], np.float32)]
    )
    ours = torch.from_numpy(_encoded(values, "BF16").view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])
