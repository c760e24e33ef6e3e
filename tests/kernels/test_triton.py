"""The Triton backend against float64 and PyTorch: on a GPU, or interpreted where there is none."""

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from expertd.kernels import (
    ExpertBiases,
    FourBits,
    GroupTable,
    OtherGlu,
    Quantized,
    Swiglu,
    WeightFormat,
    Weights,
    compute_permutation,
    decode,
    dequantize_rows,
    fused_experts,
    fused_experts_in_parts,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    permute_rows,
    quantize_blocks,
    quantize_rows,
    unpermute_rows,
)
from expertd.kernels.backends.triton import plans
from expertd.kernels.backends.triton.backend import TritonBackend
from expertd.kernels.backends.triton.build import function_of
from expertd.kernels.backends.triton.targets import TARGETS
from expertd.kernels.backends.triton.variants import heights, variants_for
from expertd.kernels.ops.activation import SILU, Activation
from expertd.kernels.ops.four_bits import format_of, mapped, packed_codes, quantize_nvfp4
from expertd.kernels.request_table import DATATYPES, MAX_REQUESTS
from tests.kernels.expert_parts import (
    expect_slots_found,
    in_one_memory,
    num_groups_of,
    placed,
    random_biases,
)
from tests.kernels.helpers import (
    diff,
    expect_contiguous,
    expect_masked,
    expected_experts,
    forbid_host_sync,
    fresh_generator,
    poisoned,
    random_contiguous,
    random_masked,
    random_rows,
    random_weights,
    untouched,
)
from tests.kernels.test_four_bits import QUANTIZE, Quantize, each_format
from tests.kernels.triton_on_any_device import DEVICE, KINDS, ON_GPU, OnAnyDevice
from tests.short import few_of

pytest.importorskip("triton", reason="needs Triton")

pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if ON_GPU else [])]


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> TritonBackend:
    return OnAnyDevice(TARGETS[request.param])


@pytest.fixture
def any_backend() -> TritonBackend:
    """For what does not depend on the target."""
    return OnAnyDevice(TARGETS[KINDS[-1]])


def test_variants_list_their_functions_arguments_in_order() -> None:
    """Launches pass them by position, and the compiler takes their types by name."""
    for target in TARGETS.values():
        for variant in variants_for(target):
            names = [name for name, _ in (*variant.types, *variant.constants)]
            assert names == list(function_of(variant).arg_names), variant.name


def expect_same(out: Tensor, expected: Tensor) -> None:
    """The same bits; the interpreter's products are NumPy's, which may add up in another order.

    It also cuts off what bf16 has no room for, instead of rounding.
    """
    if ON_GPU:
        assert torch.equal(out, expected)
    else:
        assert diff(out, expected) < (3e-5 if out.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    ("rows", "n", "k"), [([1], 8, 128), ([3, 0, 70, 1], 136, 256), ([0, 0, 2], 264, 128)]
)
def test_contiguous_matches_float64(rows: list[int], n: int, k: int, backend: TritonBackend) -> None:
    case = random_contiguous(rows, n, k, DEVICE)
    buffer, out = poisoned(sum(rows), n, device=DEVICE)
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend)
    expect_contiguous(case, buffer, out)


# Layouts, tiles and targets are the same code for all formats; of these, only one has a factor for each row.
a_few_formats = pytest.mark.parametrize("name", few_of(QUANTIZE, ("INT4 of 32", "NVFP4")))


@a_few_formats
def test_contiguous_of_four_bits_matches_float64(name: str) -> None:
    """Interpreted for a target whose tiles are transposed."""
    _expect_contiguous_of_four_bits(QUANTIZE[name], KINDS[-1])


@a_few_formats
def test_contiguous_of_four_bits_on_other_targets(name: str) -> None:
    """Interpreted for one that stands for all others."""
    _expect_contiguous_of_four_bits(QUANTIZE[name], KINDS[0])


def _expect_contiguous_of_four_bits(quantize: Quantize, capability: int) -> None:
    rows, n, backend = [3, 0, 70, 1], 136, OnAnyDevice(TARGETS[capability])
    case = random_contiguous(rows, n, 256, DEVICE, quantize=quantize)
    buffer, out = poisoned(sum(rows), n, device=DEVICE)
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend)
    expect_contiguous(case, buffer, out)


def test_rows_of_no_group_are_not_written(any_backend: TritonBackend) -> None:
    case = random_contiguous([3, 2], 64, 128, DEVICE)
    _, out = poisoned(5, 64, device=DEVICE)
    offsets = torch.tensor([0, 2, 2], dtype=torch.int32, device=DEVICE)
    grouped_gemm_contiguous(case.a, case.b, offsets, out=out, backend=any_backend)
    assert untouched(out[2:])
    assert not untouched(out[:2])


@pytest.mark.parametrize(
    ("counts", "max_m", "n", "k"), [([1], 1, 8, 128), ([3, 0, 20, 1], 20, 136, 256), ([0, 0], 5, 64, 128)]
)
def test_masked_matches_float64(
    counts: list[int], max_m: int, n: int, k: int, backend: TritonBackend
) -> None:
    case = random_masked(counts, max_m, n, k, DEVICE)
    buffer, out = poisoned(len(counts), max_m, n, device=DEVICE)
    grouped_gemm_masked(case.a, case.b, case.counts, out=out, backend=backend)
    expect_masked(case, buffer, out)


@a_few_formats
def test_masked_of_four_bits_matches_float64(name: str, any_backend: TritonBackend) -> None:
    counts, max_m, n = [3, 0, 20, 1], 20, 136
    case = random_masked(counts, max_m, n, 256, DEVICE, quantize=QUANTIZE[name])
    buffer, out = poisoned(len(counts), max_m, n, device=DEVICE)
    grouped_gemm_masked(case.a, case.b, case.counts, out=out, backend=any_backend)
    expect_masked(case, buffer, out)


@pytest.mark.parametrize("backend", few_of(KINDS, KINDS[-1:]), indirect=True)
def test_all_tiles_layouts_and_sm_counts_give_the_same_bits(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _expect_same_bits(quantize_blocks, backend, monkeypatch)


@a_few_formats
def test_the_same_with_four_bits(
    name: str, any_backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _expect_same_bits(QUANTIZE[name], any_backend, monkeypatch)


def _expect_same_bits(
    quantize: Callable[[Tensor], Weights], backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's result depends only on the row and the weight."""
    counts, n = [17, 0, 40, 3], 136
    case = random_masked(counts, 40, n, 256, DEVICE, quantize=quantize)
    data = torch.cat([case.a.data.view(torch.uint8)[g, :c] for g, c in enumerate(counts)])
    scales = torch.cat([case.a.scales[g, :c] for g, c in enumerate(counts)])
    packed = Quantized(data.view(torch.float8_e4m3fn), scales)
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    outs = []
    for height in heights(backend._kernels.target, format_of(case.b)):
        monkeypatch.setattr(plans, "choose", lambda *_, height=height: height)
        outs.append(grouped_gemm_contiguous(packed, case.b, offsets, backend=backend, num_sms=height // 16))
    masked = grouped_gemm_masked(case.a, case.b, case.counts, backend=backend)
    outs.append(torch.cat([masked[g, :c] for g, c in enumerate(counts)]))
    for out in outs[1:]:
        expect_same(out, outs[0])


def test_row_major_scales_give_the_same_bits(any_backend: TritonBackend) -> None:
    case = random_contiguous([3, 4], 64, 256, DEVICE)
    column_major = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=any_backend)
    row_major = case.a._replace(scales=case.a.scales.contiguous())
    expect_same(grouped_gemm_contiguous(row_major, case.b, case.offsets, backend=any_backend), column_major)


def test_nan_stays_in_its_own_row(backend: TritonBackend) -> None:
    case = random_contiguous([2, 3], 64, 256, DEVICE)
    clean = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    case.a.scales[1] = torch.nan
    out = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    assert out[1].isnan().all()
    keep = torch.tensor([0, 2, 3, 4], device=DEVICE)
    assert torch.equal(out[keep], clean[keep])


@pytest.mark.parametrize("side", ["rows", "weights"])
def test_every_code_is_multiplied_exactly(side: str, backend: TritonBackend) -> None:
    """Each of the 256 codes times 1, with NaN for the two of NaN, which the interpreter's FP8 lacks."""
    codes = torch.zeros(256, 128, dtype=torch.uint8, device=DEVICE)
    codes[:, 5] = torch.arange(256, dtype=torch.uint8)
    one = torch.zeros(16, 128, dtype=torch.uint8, device=DEVICE)
    one[:, 5] = 0x38
    a, b = (codes, one) if side == "rows" else (one, codes)
    m, n = len(a), len(b)
    ones = torch.ones(m, 1, device=DEVICE), torch.ones(1, -(-n // 128), 1, device=DEVICE)
    out = grouped_gemm_contiguous(
        Quantized(a.view(torch.float8_e4m3fn), ones[0]),
        Quantized(b.view(torch.float8_e4m3fn)[None], ones[1]),
        torch.tensor([0, m], dtype=torch.int32, device=DEVICE),
        backend=backend,
    ).float()
    values = codes[:, 5].view(torch.float8_e4m3fn).float()
    known = ~values.isnan() if backend._kernels.target.fp8 and not ON_GPU else torch.ones_like(values).bool()
    for each in out.unbind(1 if side == "rows" else 0):
        assert torch.equal(each[known].nan_to_num(9999), values[known].nan_to_num(9999))


@each_format
def test_every_code_of_four_bits_is_exact(quantize: Quantize, any_backend: TritonBackend) -> None:
    """Each of the 16 at each place of a block, with scales that leave numbers that bf16 holds."""
    k, generator = 128, fresh_generator()
    weights = quantize(torch.ones(1, 16, k))
    weights.data.copy_(packed_codes(torch.arange(16)[:, None] + torch.arange(k)))
    powers = torch.randint(-6, 7, weights.scales.shape, generator=generator)
    is_mxfp4 = weights.format is WeightFormat.MXFP4
    weights.scales.copy_(powers + 127 if is_mxfp4 else torch.exp2(powers))
    if weights.whole is not None:
        weights.whole.copy_(torch.exp2(torch.randint(-6, 7, weights.whole.shape, generator=generator)))
    rows = Quantized(torch.eye(k).to(torch.float8_e4m3fn).to(DEVICE), torch.ones(k, 1, device=DEVICE))
    offsets = torch.tensor([0, k], dtype=torch.int32, device=DEVICE)
    on_device = mapped(weights, lambda tensor: tensor.to(DEVICE))
    out = grouped_gemm_contiguous(rows, on_device, offsets, backend=any_backend)
    assert torch.equal(out.t().float().cpu(), decode(weights)[0])


def test_every_scale_of_mxfp4_is_exact(any_backend: TritonBackend) -> None:
    """Up to 2**100, which is far above what is loaded; 255 is NaN."""
    scales = torch.arange(1, 233, dtype=torch.uint8)
    scales[228:] = 255
    data = torch.full((1, 232, 64), 0x22, dtype=torch.uint8, device=DEVICE)  # 1
    of_groups = scales.view(1, 232, 1).expand(1, 232, 4).contiguous().to(DEVICE)
    weights = FourBits(data, of_groups, WeightFormat.MXFP4)
    one = torch.zeros(1, 128, dtype=torch.uint8, device=DEVICE)
    one[0, 77] = 0x38
    rows = Quantized(one.view(torch.float8_e4m3fn), torch.ones(1, 1, device=DEVICE))
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    out = grouped_gemm_contiguous(rows, weights, offsets, backend=any_backend)[0].double().cpu()
    assert out[228:].isnan().all()
    assert torch.equal(out[:228], torch.exp2(scales[:228].double() - 127))


class Layer(NamedTuple):
    """Arguments of `fused_experts`."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    gate_up: Weights
    down: Weights

    def run(self, backend: TritonBackend, out_dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        out = torch.full(self.hidden_states.shape, torch.nan, dtype=out_dtype, device=DEVICE)
        return fused_experts(*self, out=out, backend=backend, **options)

    def expected(self, activation: Activation = SILU, biases: ExpertBiases | None = None) -> Tensor:
        return expected_experts(*self, activation, biases)


def _layer(
    rows_per_group: Sequence[int],
    *,
    slots: int = 2,
    outside: int = 0,
    h: int = 128,
    i: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    quantize: Callable[[Tensor], Weights] = quantize_blocks,
) -> Layer:
    """Random arguments: ids in random order, rows_per_group[g] of them g, `outside` more naming no group."""
    generator, num_groups = fresh_generator(DEVICE), len(rows_per_group)
    ids = torch.arange(num_groups).repeat_interleave(torch.tensor(rows_per_group))
    none = torch.tensor([-1, num_groups, -(2**31), 2**31 - 1])[torch.arange(outside) % 4]
    ids = torch.cat([ids, none])
    ids = ids[torch.randperm(len(ids))].to(torch.int32).view(-1, slots).to(DEVICE)
    columns = -(-h // 128) * 128
    gate_up = quantize(random_weights(num_groups, 2 * i, columns, generator)[..., :h] * h**-0.5)
    down = quantize(random_weights(num_groups, h, i, generator) * i**-0.5)
    hidden_states = random_rows((len(ids), columns), generator)[:, :h].to(dtype).contiguous()
    weights = torch.randn(ids.shape, generator=generator, device=DEVICE)
    return Layer(hidden_states, ids, weights, gate_up, down)


TOLERANCE = 1e-2  # activations are rounded to FP8; see tests/kernels/test_fused_experts.py


@pytest.mark.parametrize("rows", [[1, 1], [0, 7, 0, 3]])
def test_experts_match_float64(rows: list[int], backend: TritonBackend) -> None:
    layer = _layer(rows, h=256)
    out = layer.run(backend)
    assert diff(out, layer.expected()) < TOLERANCE
    if ON_GPU:
        with forbid_host_sync():
            again = layer.run(backend)
        assert torch.equal(again, out)


@a_few_formats
def test_experts_of_four_bits_match_float64(name: str, any_backend: TritonBackend) -> None:
    """Also where a row ends within a block, if the format allows that."""
    h = 256 if name == "INT4 of 128" else 160
    layer, generator = _layer([0, 7, 0, 3], h=h, quantize=QUANTIZE[name]), fresh_generator(DEVICE)
    assert diff(layer.run(any_backend), layer.expected()) < TOLERANCE
    activation = OtherGlu(1.702, 1.5, 1.0)
    biases = ExpertBiases(
        *(torch.randn(4, n, generator=generator, device=DEVICE).to(torch.bfloat16) for n in (256, h))
    )
    out = layer.run(any_backend, activation=activation, biases=biases)
    assert diff(out, layer.expected(activation, biases)) < TOLERANCE


@pytest.mark.parametrize("biased", few_of([False, True], [True]))
@pytest.mark.parametrize("quantize", [quantize_blocks, quantize_nvfp4], ids=["FP8", "NVFP4"])
def test_parts_give_the_bits_of_the_whole(
    quantize: Callable[[Tensor], Weights], biased: bool, any_backend: TritonBackend
) -> None:
    layer = _layer([2, 0, 7, 3], outside=2, h=256, quantize=quantize)
    cuts = [[2, 0], [3], [1]]
    hidden_states, topk_ids, topk_weights, gate_up, down = layer
    biases = random_biases(gate_up, down) if biased else None
    groups, parts = placed(topk_ids, cuts, 4), in_one_memory(gate_up, down, cuts, biases)
    out = fused_experts_in_parts(
        hidden_states, groups, topk_weights, parts, num_groups_of(cuts), backend=any_backend
    )
    assert torch.equal(out, layer.run(any_backend, biases=biases))


@pytest.mark.parametrize("biased", [False, True])
def test_a_table_finds_experts_in_slots(biased: bool, any_backend: TritonBackend) -> None:
    layer = _layer([2, 0, 7, 3], outside=2, h=256)
    hidden_states, topk_ids, topk_weights, gate_up, down = layer
    biases = random_biases(gate_up, down) if biased else None

    def run(table: GroupTable, kept: Sequence[int], offsets: Tensor) -> Tensor:
        return fused_experts_in_parts(
            hidden_states, topk_ids, topk_weights, in_one_memory(gate_up, down, [kept], biases), len(kept),
            num_experts=4, backend=any_backend, offsets=offsets, table=table,
        )  # fmt: skip

    expect_slots_found(topk_ids, 4, run, layer.run(any_backend, biases=biases))


def test_experts_with_many_rows(any_backend: TritonBackend) -> None:
    """More than a tile has."""
    layer = _layer([70, 2], slots=12)
    assert diff(layer.run(any_backend), layer.expected()) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype, any_backend: TritonBackend) -> None:
    layer = _layer([6, 2], dtype=dtype)
    out = layer.run(any_backend, dtype)
    assert out.dtype == dtype
    assert diff(out, layer.expected()) < TOLERANCE


def test_slots_of_no_expert_add_nothing(any_backend: TritonBackend) -> None:
    """Whatever their weights are; `offsets` counts the others."""
    layer = _layer([4, 0, 5], slots=3, outside=9)
    outside = (layer.topk_ids < 0) | (layer.topk_ids >= 3)
    layer.topk_weights[outside] = torch.nan
    offsets = torch.full((4,), 99, dtype=torch.int32, device=DEVICE)
    out = layer.run(any_backend, offsets=offsets)
    assert diff(out, layer.expected()) < TOLERANCE
    assert not out[outside.all(1)].any()
    assert offsets.tolist() == [0, 4, 4, 9]


@pytest.mark.parametrize(
    ("activation", "h"),
    [
        (Swiglu(1.702, 1.5), 144),
        (OtherGlu(1.702, 1.5, 1.0), 192),
        (OtherGlu(1.0, 1.5, 0.5, True), 144),
    ],
    ids=str,
)
def test_biases_other_activations_and_odd_hidden_sizes(
    activation: Activation, h: int, any_backend: TritonBackend
) -> None:
    layer, generator = _layer([5, 0, 3], h=h), fresh_generator(DEVICE)
    gate_up, down = (
        torch.randn(3, n, generator=generator, device=DEVICE).to(torch.bfloat16) for n in (256, h)
    )
    biases = ExpertBiases(gate_up, down)
    out = layer.run(any_backend, activation=activation, biases=biases)
    assert diff(out, layer.expected(activation, biases)) < TOLERANCE
    assert diff(out, layer.expected(activation)) > 2 * TOLERANCE


def test_rows_that_are_quantized_already_are_multiplied_as_they_are(any_backend: TritonBackend) -> None:
    """Rows of any strides, with scales that the quantizer would not choose."""
    layer, generator = _layer([4, 4], h=256), fresh_generator(DEVICE)
    data = torch.randn(4, 272, generator=generator, device=DEVICE)[:, :256].to(torch.float8_e4m3fn)
    scales = torch.rand(2, 4, generator=generator, device=DEVICE).t() + 0.5
    floats = dequantize_rows(data.contiguous(), scales)
    out = fused_experts(Quantized(data, scales), *layer[1:], backend=any_backend)
    assert diff(out, layer._replace(hidden_states=floats).expected()) < TOLERANCE


def test_a_token_does_not_depend_on_its_batch(backend: TritonBackend) -> None:
    layer = _layer([3, 18, 1])
    together = layer.run(backend, num_sms=3)
    part = slice(7, 8)
    ids, weights = (each[part].clone() for each in (layer.topk_ids, layer.topk_weights))
    alone = Layer(layer.hidden_states[part], ids, weights, layer.gate_up, layer.down)
    expect_same(alone.run(backend)[0], together[7])


@pytest.mark.parametrize(("num_groups", "shape"), [(3, (7, 3)), (5, (900, 3)), (1, (1, 1))])
def test_the_permutation_is_that_of_pytorch(
    num_groups: int, shape: tuple[int, int], any_backend: TritonBackend
) -> None:
    ids = torch.randint(-1, num_groups + 1, shape, generator=fresh_generator(), dtype=torch.int32).to(DEVICE)
    offsets, inverse = any_backend._permutation(ids, num_groups)
    expected = compute_permutation(ids, num_groups)
    assert torch.equal(offsets, expected.offsets)
    there = (ids >= 0) & (ids < num_groups)
    assert torch.equal(inverse, expected.inverse.to(torch.int32).where(there, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_quantized_to_the_same_bits(dtype: torch.dtype, any_backend: TritonBackend) -> None:
    x = torch.randn(5, 1152, generator=fresh_generator()).mul_(10).to(dtype).to(DEVICE)
    x[3, 5], x[4], x[2, 128:256] = torch.nan, 0, torch.finfo(dtype).tiny
    x[1, 0] = torch.inf
    inverse = torch.tensor([[1], [0], [4], [2], [3]], dtype=torch.int32, device=DEVICE)
    with np.errstate(invalid="ignore"):  # of the interpreter
        out = any_backend._permute(x, inverse)
    expected = permute_rows(quantize_rows(x), inverse.flatten().argsort())
    assert torch.equal(
        out.scales.contiguous().view(torch.int32), expected.scales.contiguous().view(torch.int32)
    )
    assert torch.equal(out.data.float().nan_to_num(9999), expected.data.float().nan_to_num(9999))


def test_values_are_rounded_as_by_pytorch(any_backend: TritonBackend) -> None:
    """Every FP8 number, the middle between each two, and the fp32 numbers beside that."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
    values = torch.cat([values, -values])
    rows = torch.zeros(-(-len(values) // 127), 128)
    rows[:, 0] = 448.0  # for a scale of 1
    rows[:, 1:] = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    inverse = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)[:, None]
    out = any_backend._permute(rows.to(DEVICE), inverse)
    assert (out.scales == 1).all()
    expected = rows.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out.data.view(torch.uint8).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpermute_adds_up_in_the_order_of_slots(dtype: torch.dtype, any_backend: TritonBackend) -> None:
    """2**30 and -2**30 times one row cancel, and lose whatever was added between them; -1 adds nothing."""
    rows = random_rows((3, 1152), fresh_generator(DEVICE))
    big = float(2**30)
    inverse = torch.tensor(
        [[0, 0, 1], [0, 1, 0], [2, -1, -1], [-1, -1, -1]], dtype=torch.int32, device=DEVICE
    )
    weights = torch.tensor([[big, -big, 1], [big, 1, -big], [0.5, torch.nan, 1], [1, 1, 1]], device=DEVICE)
    out = torch.full((4, 1152), torch.nan, dtype=dtype, device=DEVICE)
    any_backend.unpermute(rows, inverse, weights, out)
    expected = unpermute_rows(rows, inverse.clamp(min=0), weights, inverse < 0).to(dtype)
    assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]])
    assert not torch.equal(out[1], out[0])


class PlainTable:
    """What `gather_rows` and `scatter_rows` know of a RequestTable, in any memory."""

    def __init__(self, requests: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        # Not from the heap, which may be below 2**31: the interpreter would take such an address for 32 bits.
        packed, token = mmap.mmap(-1, 16 + 48 * MAX_REQUESTS), 0
        for place, (rows, ids, weights, out) in enumerate(requests):
            addresses = [each.data_ptr() for each in (rows, ids, weights, out)]
            kinds = DATATYPES[out.dtype], ids.dtype == torch.int64
            struct.pack_into(
                "<QQQQIIII", packed, 16 + 48 * place, *addresses, token, token + len(rows), *kinds
            )
            token += len(rows)
        struct.pack_into("<IIII", packed, 0, token, len(requests), 0, 0)
        self._tensor = torch.frombuffer(packed, dtype=torch.uint8).to(DEVICE)
        self.address = self._tensor.data_ptr()


def test_rows_of_requests_are_gathered_and_scattered(any_backend: TritonBackend) -> None:
    """Padding stays as it was, but for its ids; ids that name no expert become -1."""
    h, top_k, generator = 144, 3, fresh_generator()
    requests = []
    for size, wide, dtype in ((2, False, torch.float32), (1, True, torch.bfloat16), (3, True, torch.float16)):
        rows = torch.randn(size, h, generator=generator).to(torch.bfloat16)
        ids = torch.randint(-2, 10, (size, top_k), generator=generator)
        ids[0, 0] = 3 + (1 << 33) if wide else 3
        weights = torch.randn(size, top_k, generator=generator)
        given = rows, ids if wide else ids.int(), weights, torch.full((size, h), 7.0, dtype=dtype)
        requests.append(tuple(each.to(DEVICE) for each in given))
    table: Any = PlainTable(requests)  # type: ignore[arg-type]
    hidden_states = torch.full((8, h), 9, dtype=torch.bfloat16, device=DEVICE)
    topk_ids = torch.full((8, top_k), 9, dtype=torch.int32, device=DEVICE)
    topk_weights = torch.full((8, top_k), 9.0, device=DEVICE)
    any_backend.gather_rows(table, hidden_states, topk_ids, topk_weights, 8)
    rows, weights = (torch.cat([request[part] for request in requests]) for part in (0, 2))
    ids = torch.cat([request[1].long() for request in requests])
    assert torch.equal(hidden_states[:6], rows)
    assert torch.equal(topk_ids[:6].long(), ids.where((ids >= 0) & (ids < 8), -1))
    assert torch.equal(topk_weights[:6], weights)
    assert (hidden_states[6:] == 9).all()
    assert (topk_ids[6:] == -1).all()
    results = torch.randn(8, h, generator=generator).to(DEVICE)
    any_backend.scatter_rows(results, table)
    parts = torch.split(results[:6], [len(request[0]) for request in requests])
    for (*_, out), part in zip(requests, parts, strict=True):
        expect_same(out, part.to(out.dtype))
    without = torch.full_like(hidden_states, 9)
    any_backend.gather_rows(table, without, None, None)
    assert torch.equal(without, hidden_states)


def test_more_slots_than_a_program_has_are_refused(any_backend: TritonBackend) -> None:
    wide = torch.empty(1, 257, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="topk_ids top_k: expected at most 256, got 257"):
        any_backend.gather_rows(PlainTable([]), torch.empty(1, 128, device=DEVICE), wide, wide)  # type: ignore[arg-type]
