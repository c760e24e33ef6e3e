"""The layer against the float64 reference in both layouts, and its independence of the batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import Quantized, Routing, choose_experts, resolve_backend
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, random_weights
from tests.kernels.helpers import diff, fresh_generator
from tests.service.moe.reference_layer import assert_close, reference_layer

SHAPE = LayerShape(hidden_size=384, intermediate_size=256, num_experts=12, top_k=3)
LAYOUTS = {"contiguous": 0, "masked": 1000}
SAME = 1e-4  # in another batch, an activation may round the other way


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return random_weights(SHAPE, fresh_generator().initial_seed(), "cpu")


def _layer(weights: ExpertWeights, layout: str, *, renormalize: bool = True) -> MoELayer:
    backend = resolve_backend("reference")
    masked_max_tokens = LAYOUTS[layout]
    routing = Routing(renormalize=renormalize)
    return MoELayer(SHAPE, weights, backend, routing=routing, masked_max_tokens=masked_max_tokens)


def _hidden_states(num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, SHAPE.hidden_size, generator=fresh_generator()).to(dtype)


def _routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    generator = fresh_generator()
    scores = torch.rand(num_tokens, SHAPE.num_experts, generator=generator)
    topk_weights = torch.randn(num_tokens, SHAPE.top_k, generator=generator)
    return scores.argsort(dim=1)[:, : SHAPE.top_k].to(torch.int32), topk_weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_layer_matches_the_reference(
    weights: ExpertWeights, layout: str, dtype: torch.dtype, num_tokens: int
) -> None:
    hidden_states = _hidden_states(num_tokens, dtype)
    out = _layer(weights, layout)(hidden_states)
    assert out.dtype == torch.float32
    assert_close(out, reference_layer(hidden_states, weights, SHAPE.top_k))


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_a_cpu_rounds_activations_only_to_bf16(weights: ExpertWeights, num_tokens: int) -> None:
    """In the contiguous layout: a diff of 1.5e-5 on average; the worst of 800 single tokens had 3.1e-5."""
    hidden_states = _hidden_states(num_tokens)
    out = _layer(weights, "contiguous")(hidden_states)
    assert diff(out, reference_layer(hidden_states, weights, SHAPE.top_k)) < 2e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("to_one_set", [False, True])
def test_given_routing_is_used_whatever_its_strides(
    weights: ExpertWeights, layout: str, to_one_set: bool
) -> None:
    hidden_states, (topk_ids, topk_weights) = _hidden_states(70), _routing(70)
    if to_one_set:
        topk_ids = torch.tensor([[11, 0, 5]], dtype=torch.int32).repeat(70, 1)
    layer = _layer(weights, layout)
    out = layer(hidden_states, topk_ids, topk_weights)
    expected = reference_layer(
        hidden_states, weights, SHAPE.top_k, topk_ids=topk_ids, topk_weights=topk_weights
    )
    assert_close(out, expected)
    by_column = [tensor.t().contiguous().t() for tensor in (topk_ids, topk_weights)]
    assert torch.equal(layer(hidden_states, by_column[0], by_column[1]), out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_not_divided_by_their_sum_without_renormalize(
    weights: ExpertWeights, layout: str
) -> None:
    hidden_states = _hidden_states(5)
    out = _layer(weights, layout, renormalize=False)(hidden_states)
    expected = reference_layer(hidden_states, weights, SHAPE.top_k, renormalize=False)
    assert_close(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_rule_and_a_bias_are_used(weights: ExpertWeights, layout: str) -> None:
    bias = torch.randn(SHAPE.num_experts, generator=fresh_generator())
    biased = replace(weights, router_bias=bias)
    routing = Routing("sigmoid", routed_scaling_factor=2.5, num_expert_groups=4, topk_group=2)
    masked_max_tokens = LAYOUTS[layout]
    layer = MoELayer(
        SHAPE, biased, resolve_backend("reference"), routing=routing, masked_max_tokens=masked_max_tokens
    )
    hidden_states = _hidden_states(17)
    logits = hidden_states @ weights.router.float().t()
    ids, topk_weights = choose_experts(logits, bias, SHAPE.top_k, routing)
    expected = reference_layer(hidden_states, weights, SHAPE.top_k, topk_ids=ids, topk_weights=topk_weights)
    assert_close(layer(hidden_states), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_experts_are_added_to_every_token(layout: str) -> None:
    shape = replace(SHAPE, num_shared_experts=2)
    weights = random_weights(shape, fresh_generator().initial_seed(), "cpu")
    masked_max_tokens = LAYOUTS[layout]
    layer = MoELayer(shape, weights, resolve_backend("reference"), masked_max_tokens=masked_max_tokens)
    hidden_states = _hidden_states(33)
    assert_close(
        layer(hidden_states), reference_layer(hidden_states, weights, SHAPE.top_k, num_shared_experts=2)
    )


def _part(weights: ExpertWeights, held: range, *shared: int) -> tuple[LayerShape, ExpertWeights]:
    """The layer's shape and weights with only these experts."""
    groups = [*held, *shared]
    gate_up, down = (Quantized(w.data[groups], w.scales[groups]) for w in (weights.gate_up, weights.down))
    shape = replace(SHAPE, num_shared_experts=len(shared), local_experts=held)
    return shape, replace(weights, gate_up=gate_up, down=down)


def test_parts_of_a_layer_add_up_to_it() -> None:
    whole = replace(SHAPE, num_shared_experts=1)
    weights = random_weights(whole, fresh_generator().initial_seed(), "cpu")
    parts = [_part(weights, range(5), 12), _part(weights, range(5, 6)), _part(weights, range(6, 12))]
    backend, hidden_states = resolve_backend("reference"), _hidden_states(40)
    outputs = [MoELayer(*part, backend)(hidden_states) for part in parts]
    for out, (shape, own) in zip(outputs, parts, strict=True):
        expected = reference_layer(
            hidden_states, own, SHAPE.top_k,
            num_shared_experts=shape.num_shared_experts, held_experts=shape.held_experts,
        )  # fmt: skip
        assert_close(out, expected)
    assert diff(torch.stack(outputs).sum(0), MoELayer(whole, weights, backend)(hidden_states)) < 1e-6


def test_a_token_without_a_local_expert_gets_zeros(weights: ExpertWeights) -> None:
    layer = MoELayer(*_part(weights, range(4, 7)), resolve_backend("reference"))
    topk_ids = torch.tensor([[0, 1, 2], [3, 8, 11], [5, 0, 8]], dtype=torch.int32)
    hidden_states = _hidden_states(3)
    hidden_states[0] = torch.nan
    offsets = torch.zeros(4, dtype=torch.int32)  # of the three experts that it holds
    out = layer(hidden_states, topk_ids, torch.ones(3, 3), offsets=offsets)
    assert layer.tokens_per_expert(offsets.numpy()).tolist() == [0] * 5 + [1] + [0] * 6
    assert not out[:2].any()
    alone = layer(hidden_states[2:], torch.tensor([[0, 1, 5]], dtype=torch.int32), torch.ones(1, 3))
    assert torch.equal(out[2:], alone)
    assert alone.any()


def test_a_part_of_a_layer_supports_only_the_contiguous_layout(weights: ExpertWeights) -> None:
    with pytest.raises(ValueError, match="masked_max_tokens: expected 0 with local_experts, got 3"):
        MoELayer(*_part(weights, range(4)), resolve_backend("reference"), masked_max_tokens=3)


def test_a_rule_that_does_not_fit_the_layer_is_refused(weights: ExpertWeights) -> None:
    with pytest.raises(
        ValueError, match=r"num_experts: expected a multiple of num_expert_groups \(5\), got 12"
    ):
        MoELayer(
            SHAPE, weights, resolve_backend("reference"), routing=Routing("sigmoid", num_expert_groups=5)
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_does_not_depend_on_its_batch(weights: ExpertWeights, layout: str) -> None:
    layer, hidden_states = _layer(weights, layout), _hidden_states(40)
    together = layer(hidden_states)
    for token in (0, 17, 39):
        alone = layer(hidden_states[token : token + 1])
        assert diff(together[token], alone[0]) < SAME


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_and_infinity_stay_in_their_own_row(weights: ExpertWeights, layout: str, bad: float) -> None:
    layer, hidden_states = _layer(weights, layout), _hidden_states(20)
    clean = layer(hidden_states)
    hidden_states[7, 100] = bad
    out = layer(hidden_states)
    assert out[7].isnan().any()
    others = torch.arange(20) != 7
    assert out[others].isfinite().all()
    assert diff(out[others], clean[others]) < SAME


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_tokens_give_zeros_and_no_tokens_nothing(weights: ExpertWeights, layout: str) -> None:
    layer = _layer(weights, layout)
    assert not layer(torch.zeros(3, SHAPE.hidden_size)).any()
    assert layer(torch.zeros(0, SHAPE.hidden_size)).shape == (0, SHAPE.hidden_size)


def test_layout_changes_past_masked_max_tokens(weights: ExpertWeights) -> None:
    layer = MoELayer(SHAPE, weights, resolve_backend("reference"), masked_max_tokens=8)
    assert [layer.layout(n) for n in (1, 8, 9)] == ["masked", "masked", "contiguous"]
    hidden_states = _hidden_states(9)
    # Only the masked layout rounds activations to FP8 on a CPU.
    assert_close(layer(hidden_states)[:8], layer(hidden_states[:8]))


def test_layer_refuses_wrong_arguments(weights: ExpertWeights) -> None:
    layer, hidden_states, (topk_ids, topk_weights) = _layer(weights, "masked"), _hidden_states(4), _routing(4)
    cases: list[tuple[tuple[Tensor | None, ...], str]] = [
        ((hidden_states[:, :256],), r"hidden_states shape: expected \[T, 384\], got \(4, 256\)"),
        ((hidden_states.double(),), "hidden_states dtype: expected torch.bfloat16 or .*, got torch.float64"),
        ((hidden_states, topk_ids), "topk_ids and topk_weights: expected both or neither, got one"),
        ((hidden_states, None, topk_weights), "expected both or neither, got one"),
        ((hidden_states, topk_ids[:3], topk_weights), r"topk_ids shape: expected \(4, 3\), got \(3, 3\)"),
        (
            (hidden_states, topk_ids.long(), topk_weights),
            "topk_ids dtype: expected torch.int32, got torch.int64",
        ),
        (
            (hidden_states, topk_ids, topk_weights[:, :2]),
            r"topk_weights shape: expected \(4, 3\), got \(4, 2\)",
        ),
        ((hidden_states, topk_ids, topk_weights.half()), "topk_weights dtype: expected torch.float32, got"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            layer(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="masked_max_tokens: expected at least 0, got -1"):
        MoELayer(SHAPE, weights, layer.backend, masked_max_tokens=-1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 256, 8, 2), "hidden_size: expected a multiple of 16, at least 128, got 100"),
        ((128, 0, 8, 2), "intermediate_size: expected a multiple of 128, at least 128, got 0"),
        ((128, 128, 0, 1), "num_experts: expected 1 to 1024, got 0"),
        ((128, 128, 1025, 1), "num_experts: expected 1 to 1024, got 1025"),
        ((128, 128, 8, 0), r"top_k: expected 1 to num_experts \(8\), got 0"),
        ((128, 128, 8, 9), r"top_k: expected 1 to num_experts \(8\), got 9"),
        ((128, 128, 8, 2, -1), "num_shared_experts: expected at least 0, got -1"),
        ((128, 128, 1024, 2, 1), "num_shared_experts: expected at most 1024 experts including .* got 1025"),
        ((128, 128, 8, 2, 0, range(9)), r"local_experts: expected a range of 0 to 7, got 0-8"),
        ((128, 128, 8, 2, 0, range(3, 3)), r"local_experts: expected a range of 0 to 7, got range\(3, 3\)"),
        ((128, 128, 8, 2, 0, range(0, 8, 2)), r"local_experts: expected .* got range\(0, 8, 2\)"),
    ],
)
def test_impossible_shapes_are_refused(sizes: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerShape(*sizes)
