"""The checks on the arguments of grouped GEMMs and FFNs: metadata only, nothing here reads elements."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # elements of K (and rows of a weight) that share one scale
MIN_N_STEP = 8  # one 16-byte store of bf16
MAX_GROUPS = 1024
MAX_ROWS = 2**31 - 1  # offsets and counts are int32
_ALIGNMENT = 16  # bytes; what TMA asks of a base address
_HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    if m > MAX_ROWS:
        raise _refusal("a rows", f"at most {MAX_ROWS}", m)
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
    a_groups, max_m, _ = a.shape
    num_groups, n, k = _check_operands(a, b, b_scales)
    if a_groups != num_groups:
        raise _refusal("a groups", f"{num_groups} as in b", a_groups)
    if max_m < 1:
        raise _refusal("a max_m", "at least 1", max_m)
    if num_groups * max_m > MAX_ROWS:
        raise _refusal("a rows", f"at most {MAX_ROWS}", num_groups * max_m)
    _check_scales("a_scales", a_scales, (num_groups, max_m, k // BLOCK))
    _check_index("counts", counts, num_groups)
    if not (expected_m is None or expected_m >= 1):
        raise _refusal("expected_m", "None or at least 1", expected_m)
    _check_common(a, a_scales, b, b_scales, counts, "counts", num_sms)
    _check_out(out, (num_groups, max_m, n), a.device)
    return Problem(num_groups, max_m, n, k)


def check_ffn(
    hidden_states: Tensor,
    tokens: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    offsets: Tensor,
    num_sms: int | None,
) -> None:
    """Raise ValueError (name, expected, got) unless `grouped_ffn` can serve these arguments."""
    _expect_ndim("hidden_states", hidden_states, 2, "[T, H]")
    if hidden_states.dtype not in _HIDDEN_DTYPES:
        raise _refusal("hidden_states dtype", " or ".join(map(str, _HIDDEN_DTYPES)), hidden_states.dtype)
    _expect_ndim("down", down[0], 3, "[G, H, I]")
    h, (num_groups, _, i) = hidden_states.shape[1], down[0].shape
    for name, size in (("H", h), ("I", i)):
        if size < BLOCK or size % BLOCK != 0:
            raise _refusal(name, f"a multiple of {BLOCK}, at least {BLOCK}", size)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise _refusal("down groups", f"1 to {MAX_GROUPS}", num_groups)
    for name, (data, scales), n, k in (("gate_up", gate_up, 2 * i, h), ("down", down, h, i)):
        _expect_shape(name, data, (num_groups, n, k))
        _check_data(name, data)
        _check_weight_scales(f"{name} scales", scales, (num_groups, n // BLOCK, k // BLOCK))
    _expect_ndim("tokens", tokens, 1, "[R]")
    if tokens.shape[0] > MAX_ROWS:
        raise _refusal("tokens rows", f"at most {MAX_ROWS}", tokens.shape[0])
    _check_index("tokens", tokens, tokens.shape[0], torch.int64)
    _check_index("offsets", offsets, num_groups + 1)
    named = {"tokens": tokens, "gate_up": gate_up[0], "gate_up scales": gate_up[1]}
    named |= {"down": down[0], "down scales": down[1], "offsets": offsets}
    for name, tensor in named.items():
        _expect_device(name, tensor, hidden_states.device, "hidden_states")
    _check_num_sms(num_sms)


def _check_operands(a: Tensor, b: Tensor, b_scales: Tensor) -> tuple[int, int, int]:
    _expect_ndim("b", b, 3, "[G, N, K]")
    num_groups, n, k = b.shape
    if a.shape[-1] != k:
        raise _refusal("a K", f"{k} as in b", a.shape[-1])
    if k < BLOCK or k % BLOCK != 0:
        raise _refusal("K", f"a multiple of {BLOCK}, at least {BLOCK}", k)
    if n < MIN_N_STEP or n % MIN_N_STEP != 0:
        raise _refusal("N", f"a multiple of {MIN_N_STEP}, at least {MIN_N_STEP}", n)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise _refusal("b groups", f"1 to {MAX_GROUPS}", num_groups)
    _check_data("a", a)
    _check_data("b", b)
    _check_weight_scales("b_scales", b_scales, (num_groups, -(-n // BLOCK), k // BLOCK))
    return num_groups, n, k


def _check_weight_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    _expect_shape(name, scales, shape)
    _expect_dtype(name, scales, torch.float32)
    if not scales.is_contiguous():
        raise _refusal(f"{name} strides", "row-major contiguous", scales.stride())


def _check_data(name: str, data: Tensor) -> None:
    _expect_dtype(name, data, torch.float8_e4m3fn)
    _expect_contiguous(name, data)
    _expect_aligned(name, data)


def _check_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    _expect_shape(name, scales, shape)
    _expect_dtype(name, scales, torch.float32)
    strides = scales.stride()
    if 1 not in strides[-2:]:
        raise _refusal(f"{name} strides", "row- or column-major (1 in one of the last two)", strides)


def _check_index(name: str, index: Tensor, length: int, dtype: torch.dtype = torch.int32) -> None:
    _expect_shape(name, index, (length,))
    _expect_dtype(name, index, dtype)
    _expect_contiguous(name, index)


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
    _expect_device("b", b, device)
    _expect_device("a_scales", a_scales, device)
    _expect_device("b_scales", b_scales, device)
    _expect_device(index_name, index, device)
    _check_num_sms(num_sms)


def _check_num_sms(num_sms: int | None) -> None:
    if not (num_sms is None or num_sms >= 1):
        raise _refusal("num_sms", "None or at least 1", num_sms)


def _check_out(out: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if out is None:
        return
    _expect_shape("out", out, shape)
    _expect_dtype("out", out, torch.bfloat16)
    _expect_device("out", out, device)
    _expect_contiguous("out", out)
    _expect_aligned("out", out)


def _expect_ndim(name: str, tensor: Tensor, ndim: int, layout: str) -> None:
    if tensor.ndim != ndim:
        raise _refusal(f"{name} shape", f"{ndim} dimensions {layout}", tuple(tensor.shape))


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise _refusal(f"{name} shape", shape, tuple(tensor.shape))


def _expect_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise _refusal(f"{name} dtype", dtype, tensor.dtype)


def _expect_device(name: str, tensor: Tensor, device: torch.device, like: str = "a") -> None:
    if tensor.device != device:
        raise _refusal(f"{name} device", f"{device} as {like}", tensor.device)


def _expect_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise _refusal(f"{name} strides", "contiguous", tensor.stride())


def _expect_aligned(name: str, tensor: Tensor) -> None:
    past = tensor.data_ptr() % _ALIGNMENT
    if past != 0:
        raise _refusal(f"{name} address", f"a multiple of {_ALIGNMENT} bytes", f"{past} bytes past one")


def _refusal(what: str, expected: object, got: object) -> ValueError:
    """Made only when it is raised: on every call the words would cost more than the checks."""
    return ValueError(f"{what}: expected {expected}, got {got}")
