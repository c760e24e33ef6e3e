"""The checks on the grouped GEMMs' arguments: metadata only, nothing here reads a tensor's elements."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # elements of K (and rows of a weight) that share one scale
MIN_N_STEP = 8  # one 16-byte store of bf16
MAX_GROUPS = 1024
MAX_ROWS = 2**31 - 1  # offsets and counts are int32
_ALIGNMENT = 16  # bytes; what TMA asks of a base address


class Problem(NamedTuple):
    """The sizes of one grouped GEMM; m is M (contiguous) or max_m (masked)."""

    num_groups: int
    m: int
    n: int
    k: int


def check_contiguous(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    offsets: Tensor,
    out: Tensor | None,
    num_sms: int | None,
) -> Problem:
    """Raise ValueError (name, expected, got) unless `grouped_gemm_contiguous` can serve these arguments."""
    _expect_ndim("a", a, 2, "[M, K]")
    m = a.shape[0]
    num_groups, n, k = _check_operands(a, b, b_scales)
    _expect(m <= MAX_ROWS, "a rows", f"at most {MAX_ROWS}", m)
    _check_scales("a_scales", a_scales, (m, k // BLOCK))
    _check_index("offsets", offsets, num_groups + 1)
    _check_common(a, a_scales, b, b_scales, offsets, "offsets", num_sms)
    _check_out(out, (m, n), a.device)
    return Problem(num_groups, m, n, k)


def check_masked(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    counts: Tensor,
    expected_m: int | None,
    out: Tensor | None,
    num_sms: int | None,
) -> Problem:
    """Raise ValueError (name, expected, got) unless `grouped_gemm_masked` can serve these arguments."""
    _expect_ndim("a", a, 3, "[G, max_m, K]")
    max_m = a.shape[1]
    num_groups, n, k = _check_operands(a, b, b_scales)
    _expect(a.shape[0] == num_groups, "a groups", f"{num_groups} as in b", a.shape[0])
    _expect(max_m >= 1, "a max_m", "at least 1", max_m)
    _expect(num_groups * max_m <= MAX_ROWS, "a rows", f"at most {MAX_ROWS}", num_groups * max_m)
    _check_scales("a_scales", a_scales, (num_groups, max_m, k // BLOCK))
    _check_index("counts", counts, num_groups)
    _expect(expected_m is None or expected_m >= 1, "expected_m", "None or at least 1", expected_m)
    _check_common(a, a_scales, b, b_scales, counts, "counts", num_sms)
    _check_out(out, (num_groups, max_m, n), a.device)
    return Problem(num_groups, max_m, n, k)


def _check_operands(a: Tensor, b: Tensor, b_scales: Tensor) -> tuple[int, int, int]:
    _expect_ndim("b", b, 3, "[G, N, K]")
    num_groups, n, k = b.shape
    _expect(a.shape[-1] == k, "a K", f"{k} as in b", a.shape[-1])
    _expect(k >= BLOCK and k % BLOCK == 0, "K", f"a multiple of {BLOCK}, at least {BLOCK}", k)
    _expect(
        n >= MIN_N_STEP and n % MIN_N_STEP == 0, "N", f"a multiple of {MIN_N_STEP}, at least {MIN_N_STEP}", n
    )
    _expect(1 <= num_groups <= MAX_GROUPS, "b groups", f"1 to {MAX_GROUPS}", num_groups)
    _expect_data("a", a)
    _expect_data("b", b)
    _expect_shape("b_scales", b_scales, (num_groups, -(-n // BLOCK), k // BLOCK))
    _expect(b_scales.dtype == torch.float32, "b_scales dtype", torch.float32, b_scales.dtype)
    _expect(b_scales.is_contiguous(), "b_scales strides", "row-major contiguous", b_scales.stride())
    return num_groups, n, k


def _check_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    _expect_shape(name, scales, shape)
    _expect(scales.dtype == torch.float32, f"{name} dtype", torch.float32, scales.dtype)
    strides = scales.stride()
    _expect(1 in strides[-2:], f"{name} strides", "row- or column-major (1 in one of the last two)", strides)


def _check_index(name: str, index: Tensor, length: int) -> None:
    _expect_shape(name, index, (length,))
    _expect(index.dtype == torch.int32, f"{name} dtype", torch.int32, index.dtype)
    _expect(index.is_contiguous(), f"{name} strides", "contiguous", index.stride())


def _check_common(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    index: Tensor,
    index_name: str,
    num_sms: int | None,
) -> None:
    device = a.device
    _expect(b.device == device, "b device", f"{device} as a", b.device)
    _expect(a_scales.device == device, "a_scales device", f"{device} as a", a_scales.device)
    _expect(b_scales.device == device, "b_scales device", f"{device} as a", b_scales.device)
    _expect(index.device == device, f"{index_name} device", f"{device} as a", index.device)
    _expect(num_sms is None or num_sms >= 1, "num_sms", "None or at least 1", num_sms)


def _check_out(out: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if out is None:
        return
    _expect_shape("out", out, shape)
    _expect(out.dtype == torch.bfloat16, "out dtype", torch.bfloat16, out.dtype)
    _expect(out.device == device, "out device", f"{device} as a", out.device)
    _expect(out.is_contiguous(), "out strides", "contiguous", out.stride())
    _expect_aligned("out", out)


def _expect_data(name: str, data: Tensor) -> None:
    _expect(data.dtype == torch.float8_e4m3fn, f"{name} dtype", torch.float8_e4m3fn, data.dtype)
    _expect(data.is_contiguous(), f"{name} strides", "contiguous", data.stride())
    _expect_aligned(name, data)


def _expect_aligned(name: str, tensor: Tensor) -> None:
    past = tensor.data_ptr() % _ALIGNMENT
    _expect(past == 0, f"{name} address", f"a multiple of {_ALIGNMENT} bytes", f"{past} bytes past one")


def _expect_ndim(name: str, tensor: Tensor, ndim: int, layout: str) -> None:
    _expect(tensor.ndim == ndim, f"{name} shape", f"{ndim} dimensions {layout}", tuple(tensor.shape))


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    _expect(tensor.shape == shape, f"{name} shape", shape, tuple(tensor.shape))


def _expect(ok: bool, what: str, expected: object, got: object) -> None:
    if not ok:
        raise ValueError(f"{what}: expected {expected}, got {got}")
