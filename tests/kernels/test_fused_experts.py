"""A layer's experts on a CPU against float64, with the backend's own FFN and with the default steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    Quantized,
    compute_permutation,
    dequantize_rows,
    fused_experts,
    fused_experts_in_parts,
    quantize_blocks,
    quantize_rows,
)
from expertd.kernels.backends.cpu.backend import CpuBackend
from expertd.kernels.backends.reference import matrices
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.ops.activation import SILU, Activation, OtherGlu, Swiglu, rounded_swiglu, swiglu
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.parts import ExpertPart, GroupTable
from tests.kernels.expert_parts import (
    Cuts,
    expect_slots_found,
    in_one_memory,
    num_groups_of,
    placed,
    random_biases,
)
from tests.kernels.helpers import diff, expected_experts, fresh_generator, random_rows, random_weights

# The `diff` from rounding hidden states, activations and rows in 10662 draws of 1 to 1025 rows: to bf16
# 1.2e-5 on average and 4.7e-5 at most, to FP8 1.0e-3 and 4.3e-3.
BF16_TOLERANCE = 2e-4
FP8_TOLERANCE = 1e-2

H, I = 256, 128  # noqa: E741


class Composed(ReferenceBackend):
    """The default steps, on this backend's GEMMs."""

    ffn = Backend.ffn


class Poisoned(ReferenceBackend):
    """Fills rows of no group with NaN, which unwritten memory may hold."""

    def ffn(self, *arguments: Any) -> Tensor:
        rows, offsets = super().ffn(*arguments), arguments[4]
        self.rows_computed = int(offsets[-1])
        rows[self.rows_computed :] = torch.nan
        return rows


@dataclass(frozen=True)
class Case:
    """Arguments of `fused_experts`."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    gate_up: Quantized
    down: Quantized
    biases: ExpertBiases | None = None

    def tokens(self, part: slice) -> "Case":
        parts = self.hidden_states[part], self.topk_ids[part], self.topk_weights[part]
        return Case(*parts, self.gate_up, self.down, self.biases)

    def run(self, backend: Backend | None = None, activation: Activation = SILU) -> Tensor:
        arguments = self.hidden_states, self.topk_ids, self.topk_weights, self.gate_up, self.down
        backend = backend or ReferenceBackend()
        return fused_experts(*arguments, activation=activation, biases=self.biases, backend=backend)

    def expected(self, activation: Activation = SILU) -> Tensor:
        arguments = self.hidden_states, self.topk_ids, self.topk_weights, self.gate_up, self.down
        return expected_experts(*arguments, activation, self.biases)


def _case(
    rows_per_group: Sequence[int],
    *,
    slots: int = 1,
    outside: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    h: int = H,
    i: int = I,
    seed: int | None = None,
) -> Case:
    """Random arguments: ids in random order, rows_per_group[g] of them g, `outside` more naming no group.

    A token may name an expert twice.
    """
    generator = fresh_generator(seed=seed)
    num_groups = len(rows_per_group)
    ids = torch.arange(num_groups).repeat_interleave(torch.tensor(rows_per_group))
    no_groups = torch.tensor([-1, num_groups, -(2**31), 2**31 - 1, num_groups + 1, -num_groups])
    ids = torch.cat([ids, no_groups[torch.arange(outside) % len(no_groups)]])
    ids = ids[torch.randperm(len(ids), generator=generator)].to(torch.int32).view(-1, slots)
    columns = -(-h // 128) * 128
    gate_up = quantize_blocks(random_weights(num_groups, 2 * i, columns, generator)[..., :h] * h**-0.5)
    down = quantize_blocks(random_weights(num_groups, h, i, generator) * i**-0.5)
    hidden_states = random_rows((len(ids), columns), generator)[:, :h].to(dtype).contiguous()
    return Case(hidden_states, ids, torch.randn(ids.shape, generator=generator), gate_up, down)


def _slots(num_rows: int) -> int:
    """The largest number of slots up to 8 that divides num_rows."""
    return max(slots for slots in range(1, 9) if num_rows % slots == 0)


ROWS = [
    [1],
    [0, 3, 0],
    [16, 0, 17, 15],
    [15, 0, 1],
    [20, 1],  # the first group's GEMM is padded past the last row
    [1] * 40,
    [255, 1, 256, 300],  # runs end between groups
    [700, 5],  # and inside a group
    [0, 0, 1025],
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [(CpuBackend, BF16_TOLERANCE), (ReferenceBackend, BF16_TOLERANCE), (Composed, FP8_TOLERANCE)],
)
def test_experts_match_float64(rows: list[int], backend: type[Backend], tolerance: float) -> None:
    case = _case(rows, slots=_slots(sum(rows)))
    out = case.run(backend())
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    assert diff(out, case.expected()) < tolerance


def _biased(case: Case) -> Case:
    generator = fresh_generator()
    num_groups, h, i = case.down.data.shape
    gate_up, down = (torch.randn(num_groups, n, generator=generator).to(torch.bfloat16) for n in (2 * i, h))
    return replace(case, biases=ExpertBiases(gate_up, down))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [(CpuBackend, BF16_TOLERANCE), (ReferenceBackend, BF16_TOLERANCE), (Composed, FP8_TOLERANCE)],
)
def test_biases_are_added_to_both_products(rows: list[int], backend: type[Backend], tolerance: float) -> None:
    case, activation = _case(rows, slots=_slots(sum(rows))), OtherGlu(1.702, 1.5, 1.0)
    biased = _biased(case)
    out = biased.run(backend(), activation)
    assert diff(out, biased.expected(activation)) < tolerance
    assert diff(out, case.expected(activation)) > 2e-2


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend, Composed])
def test_biases_of_no_expert_add_nothing(backend: type[Backend]) -> None:
    case = _biased(_case([4, 20], slots=2, outside=24))
    out, outside = case.run(backend()), (case.topk_ids < 0) | (case.topk_ids >= 2)
    assert diff(out, case.expected()) < FP8_TOLERANCE
    assert not out[outside.all(1)].any()


@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [(CpuBackend, BF16_TOLERANCE), (ReferenceBackend, BF16_TOLERANCE), (Composed, FP8_TOLERANCE)],
)
@pytest.mark.parametrize("h", [144, 192, 336])
def test_hidden_sizes_that_are_no_multiple_of_a_scales_columns(
    h: int, backend: type[Backend], tolerance: float
) -> None:
    case = _biased(_case([4, 0, 20, 1], slots=5, h=h))
    assert case.gate_up.scales.shape == (4, 2, -(-h // 128))
    assert diff(case.run(backend()), case.expected()) < tolerance


@pytest.mark.parametrize("h", [128, 384])
@pytest.mark.parametrize("i", [128, 640])
def test_sizes(h: int, i: int) -> None:
    case = _case([4, 0, 20], slots=3, h=h, i=i)
    assert diff(case.run(), case.expected()) < BF16_TOLERANCE


@pytest.mark.parametrize("slots", [1, 2, 9, 96])
def test_any_number_of_slots(slots: int) -> None:
    case = _case([2 * slots, slots, 0, 2 * slots], slots=slots)
    assert diff(case.run(), case.expected()) < BF16_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_is_written_in_place(dtype: torch.dtype) -> None:
    case = _case([6, 30], slots=2)
    out = torch.full(case.hidden_states.shape, torch.nan, dtype=dtype)
    result = fused_experts(
        case.hidden_states, case.topk_ids, case.topk_weights, case.gate_up, case.down,
        out=out, backend="reference",
    )  # fmt: skip
    assert result is out
    assert torch.equal(out, case.run().to(dtype))


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend, Composed])
def test_other_activations(backend: type[Backend]) -> None:
    case, activation = _case([6, 30], slots=2), Swiglu(alpha=1.702, limit=0.7)
    out = fused_experts(
        case.hidden_states, case.topk_ids, case.topk_weights, case.gate_up, case.down,
        activation=activation, backend=backend(),
    )  # fmt: skip
    assert diff(out, case.expected(activation)) < FP8_TOLERANCE
    assert diff(out, case.expected()) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    case = _case([6, 30], slots=2, dtype=dtype)
    assert diff(case.run(), case.expected()) < BF16_TOLERANCE


def test_rows_that_are_quantized_already_are_not_quantized_again() -> None:
    """Rows of any strides, with scales that the quantizer would not choose: FP8 GEMMs get their bits."""
    case = _case([3, 0, 9], slots=4)
    data = torch.randn(3, 33 * H // 32, generator=fresh_generator())[:, :H].to(torch.float8_e4m3fn)
    rows = Quantized(data, torch.rand(H // 128, 3, generator=fresh_generator()).t() + 0.5)
    floats = dequantize_rows(data.contiguous(), rows.scales)
    assert not torch.equal(quantize_rows(floats).scales, rows.scales)
    arguments = case.topk_ids, case.topk_weights, case.gate_up, case.down
    expected = replace(case, hidden_states=floats).expected()
    backends = (
        (CpuBackend(), BF16_TOLERANCE),
        (ReferenceBackend(), BF16_TOLERANCE),
        (Composed(), FP8_TOLERANCE),
    )
    for backend, tolerance in backends:
        assert diff(fused_experts(rows, *arguments, backend=backend), expected) < tolerance
    seen: list[Quantized] = []

    class Seeing(Composed):
        def contiguous(self, a: Quantized, *rest: Any) -> None:
            seen.append(a)
            super().contiguous(a, *rest)

    fused_experts(rows, *arguments, backend=Seeing())
    tokens = compute_permutation(case.topk_ids, 3).token_ids
    assert torch.equal(seen[0].data.float(), data.float()[tokens])
    assert torch.equal(seen[0].scales, rows.scales[tokens])


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend, Composed])
def test_hidden_states_may_have_any_strides(backend: type[Backend]) -> None:
    case = _case([6, 30], slots=2)
    strided = replace(case, hidden_states=case.hidden_states.t().contiguous().t())
    assert torch.equal(strided.run(backend()), case.run(backend()))


@pytest.mark.parametrize(("backend", "tolerance"), [(Poisoned, BF16_TOLERANCE), (Composed, FP8_TOLERANCE)])
@pytest.mark.parametrize("rows", [[4, 20], [300, 0, 2], [1, 0, 0]])
def test_slots_of_no_expert_add_nothing(rows: list[int], backend: type[Backend], tolerance: float) -> None:
    case = _case(rows, slots=2, outside=24 + sum(rows) % 2)
    outside = (case.topk_ids < 0) | (case.topk_ids >= len(rows))
    case.topk_weights[outside] = torch.nan
    out = case.run(backend())
    assert out.isfinite().all()
    assert diff(out, case.expected()) < tolerance
    assert not out[outside.all(1)].any()
    # The other tokens' results keep every bit.
    absent = replace(case, topk_ids=case.topk_ids.masked_fill(outside, -1))
    assert torch.equal(absent.run(backend()), out)


@pytest.mark.parametrize("number", [-1, 3, -(2**31), 2**31 - 1])
def test_slots_of_no_expert_are_neither_computed_nor_read(number: int) -> None:
    case, backend = _case([4, 0, 20], slots=3), Poisoned()
    case.topk_ids[5, 1] = number
    assert diff(case.run(backend), case.expected()) < BF16_TOLERANCE
    assert backend.rows_computed == 23


@pytest.mark.parametrize("backend", [Poisoned, Composed])
def test_tokens_without_experts_get_zeros(backend: type[Backend]) -> None:
    out = _case([0, 0], slots=3, outside=12).run(backend())
    assert torch.equal(out, torch.zeros(4, H))


def test_rows_are_summed_in_the_order_of_slots() -> None:
    """2**30 and -2**30 times one expert cancel, and lose whatever was added between them."""
    case, big = _case([2, 1], slots=3), float(2**30)
    ids = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=torch.int32)
    weights = torch.tensor([[big, -big, 1], [big, 1, -big], [1, big, -big]])
    tokens = replace(case, hidden_states=case.hidden_states.expand(3, H), topk_ids=ids, topk_weights=weights)
    out, alone = tokens.run(), replace(tokens, topk_weights=(weights == 1).float()).run()
    assert [torch.equal(*rows) for rows in zip(out, alone, strict=True)] == [True, False, False]


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend, Composed])
def test_an_expert_may_come_twice_in_a_token(backend: type[Backend]) -> None:
    case = _case([0, 4, 2])
    ids, weights = case.topk_ids.repeat(1, 2), case.topk_weights.repeat(1, 2)
    twice = replace(case, topk_ids=ids, topk_weights=weights)
    assert diff(twice.run(backend()), 2 * case.run(backend())) < 1e-6


def test_no_tokens_give_nothing() -> None:
    nothing, offsets = _case([2, 2], slots=2).tokens(slice(0)), torch.full((3,), 99, dtype=torch.int32)
    arguments = nothing.hidden_states, nothing.topk_ids, nothing.topk_weights, nothing.gate_up, nothing.down
    out = fused_experts(*arguments, backend="reference", offsets=offsets)
    assert (out.shape, out.dtype) == ((0, H), torch.float32)
    assert offsets.tolist() == [0, 0, 0]


def test_nan_stays_in_its_own_row() -> None:
    case = _case([5, 0, 40, 300], slots=3)
    clean = case.run()
    case.hidden_states[2, 100] = torch.nan
    out, bad = case.run(), torch.arange(len(clean)) == 2
    assert out[bad].isnan().all()
    assert torch.equal(out[~bad], clean[~bad])


def test_a_token_does_not_depend_on_its_batch() -> None:
    case = _case([5, 0, 40, 300], slots=3)
    together = case.run()
    for token in (0, 50, 114):
        alone = case.tokens(slice(token, token + 1)).run()
        assert diff(alone[0], together[token]) < BF16_TOLERANCE


def test_packed_and_plain_weights_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case([2, 40, 0, 300], slots=3)
    out = case.run()
    monkeypatch.setattr(matrices, "can_pack", lambda: False)
    backend = ReferenceBackend()
    plain = case.run(backend)
    assert not any(matrix.is_mkldnn for matrix in backend._weights.get(case.gate_up))
    assert diff(plain, out) < BF16_TOLERANCE
    assert diff(plain, case.expected()) < BF16_TOLERANCE


@pytest.mark.parametrize("height", [1, 15, 16, 17, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_plain_matrices_at_any_height(height: int, biased: bool) -> None:
    n, k = 700, 1024  # more than is expanded to fp32 at once
    rows, matrix = torch.randn(height, k).bfloat16(), torch.randn(n, k).bfloat16()
    bias = 10 * torch.randn(n).bfloat16() if biased else None
    out = matrices.multiply(rows, matrix, bias)
    expected = rows.double() @ matrix.double().T + (0 if bias is None else bias.double())
    assert (out.shape, out.dtype) == ((height, n), torch.bfloat16)
    assert diff(out, expected) < BF16_TOLERANCE


def test_modified_weights_are_used() -> None:
    case, backend = _case([4, 4], slots=2), ReferenceBackend()
    before = case.run(backend)
    case.down.scales.mul_(2)
    assert torch.equal(case.run(backend), 2 * before)
    case.gate_up.data.copy_(quantize_blocks(torch.zeros(2, 2 * I, H)).data)
    assert not case.run(backend).any()


def test_it_works_in_inference_mode_and_after() -> None:
    case, backend = _case([4, 20], slots=2), ReferenceBackend()
    with torch.inference_mode():
        inside = case.run(backend)
    case.hidden_states.requires_grad_()
    outside = case.run(backend)
    assert not outside.requires_grad
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("activation", [Swiglu(1.702, 7.0), Swiglu(0.5), OtherGlu(1.702, 7.0, 1.0)])
def test_activations_of_many_steps_are_rounded_once(activation: Activation) -> None:
    gate_up = random_rows((33, 2 * I), fresh_generator())
    expected = swiglu(gate_up, activation).to(torch.bfloat16)
    assert torch.equal(rounded_swiglu(gate_up, activation), expected)


@pytest.mark.parametrize("outside", [0, 6])
def test_offsets_are_the_rows_of_earlier_groups(outside: int) -> None:
    rows = [5, 0, 30, 1, 6]
    case = _case(rows, slots=6, outside=outside)
    offsets = torch.full((len(rows) + 1,), 99, dtype=torch.int32)
    arguments = case.hidden_states, case.topk_ids, case.topk_weights, case.gate_up, case.down
    out = fused_experts(*arguments, backend=ReferenceBackend(), offsets=offsets)
    assert torch.equal(out, case.run())
    assert offsets.tolist() == [0, 5, 5, 35, 36, 42]


@pytest.mark.parametrize("cuts", [[range(6)], [[4, 0], [5], [1, 2, 3]], [[3], [0], [2], [5], [1]]])
@pytest.mark.parametrize("rows", [[3, 0, 7, 1, 9, 4], [3, 0, 40, 1, 9, 16]], ids=["few", "uneven"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [CpuBackend, ReferenceBackend, Composed])
def test_parts_give_the_bits_of_the_whole(
    make: type[Backend], biased: bool, rows: list[int], cuts: Cuts
) -> None:
    """In any order, in memory that the next part overwrites; experts of no part add nothing."""
    case, backend = _case(rows, slots=5, outside=6), make()
    case = replace(case, biases=random_biases(case.gate_up, case.down) if biased else None)
    held = torch.zeros(7, dtype=torch.bool)
    held[[expert for cut in cuts for expert in cut]] = True
    ids = case.topk_ids.where(held[case.topk_ids.clamp(-1, 6)], -1)
    expected = replace(case, topk_ids=ids).run(make())
    out = fused_experts_in_parts(
        case.hidden_states,
        placed(case.topk_ids, cuts, 6),
        case.topk_weights,
        in_one_memory(case.gate_up, case.down, cuts, case.biases),
        num_groups_of(cuts),
        num_experts=6,
        backend=backend,
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [CpuBackend, ReferenceBackend, Composed])
def test_a_table_finds_experts_in_slots(make: type[Backend], biased: bool) -> None:
    case, backend = _case([3, 0, 7, 1, 9, 4], slots=5, outside=6), make()
    case = replace(case, biases=random_biases(case.gate_up, case.down) if biased else None)

    def run(table: GroupTable, kept: Sequence[int], offsets: Tensor) -> Tensor:
        return fused_experts_in_parts(
            case.hidden_states, case.topk_ids, case.topk_weights,
            in_one_memory(case.gate_up, case.down, [kept], case.biases), len(kept),
            num_experts=6, backend=backend, offsets=offsets, table=table,
        )  # fmt: skip

    expect_slots_found(case.topk_ids, 6, run, case.run(make()))


@pytest.mark.parametrize(
    ("groups", "seen", "expected"),
    [
        (torch.zeros(2), torch.zeros(9).int(), "table groups dtype: expected torch.int32, got torch.float32"),
        (
            torch.zeros(0).int(),
            torch.zeros(9).int(),
            r"table groups shape: expected 1 to 1024 ids \[N\], got",
        ),
        (
            torch.zeros(2).int(),
            torch.zeros(4).int(),
            "table seen shape: expected at least 5, in one dimension",
        ),
        (torch.zeros(2).int(), torch.zeros(5), "table seen dtype: expected torch.int32, got torch.float32"),
    ],
)
def test_wrong_tables_are_refused(groups: Tensor, seen: Tensor, expected: str) -> None:
    case = _case([2, 2], slots=2)
    parts = in_one_memory(case.gate_up, case.down, [[0, 1]])
    arguments = case.hidden_states, case.topk_ids, case.topk_weights, parts, 2
    with pytest.raises(ValueError, match=expected):
        fused_experts_in_parts(*arguments, backend=ReferenceBackend(), table=GroupTable(groups, seen))


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize(("num_groups", "got"), [(3, 2), (1, 2)])
def test_parts_have_all_groups(num_groups: int, got: int, num_tokens: int) -> None:
    case = _case([2, 2], slots=2)
    arguments = case.hidden_states[:num_tokens], case.topk_ids[:num_tokens], case.topk_weights[:num_tokens]
    parts = in_one_memory(case.gate_up, case.down, [[0], [1]])
    with pytest.raises(ValueError, match=f"parts groups: expected {num_groups} in all, got {got}"):
        fused_experts_in_parts(*arguments, parts, num_groups, backend=ReferenceBackend())


def test_wrong_parts_are_refused() -> None:
    case, other = _case([2, 2], slots=2), _case([2, 2], slots=2, h=2 * H)
    arguments = case.hidden_states, case.topk_ids, case.topk_weights
    parts = in_one_memory(other.gate_up, other.down, [[0, 1]])
    with pytest.raises(ValueError, match=r"gate_up shape: expected \(2, 256, 256\)"):
        fused_experts_in_parts(*arguments, parts, 2, backend=ReferenceBackend())
    with pytest.raises(ValueError, match="num_groups: expected 1 to 1024, got 1025"):
        fused_experts_in_parts(*arguments, (), 1025, backend=ReferenceBackend())
    plain = ExpertPart(case.gate_up, case.down)
    biased = plain._replace(biases=random_biases(case.gate_up, case.down))
    for mixed, expected in (((plain, biased), "none"), ((biased, plain), "some")):
        with pytest.raises(ValueError, match=f"parts biases: expected {expected} as in the part before"):
            fused_experts_in_parts(*arguments, mixed, 4, backend=ReferenceBackend())
