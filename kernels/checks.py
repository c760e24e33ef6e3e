"""Checks the arguments of grouped GEMMs: metadata only, nothing here reads elements."""

import math
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from expertd.activation import Activation, OtherGlu, Swiglu
from expertd.backends import Capabilities, taking
from expertd.kernels.ops.four_bits import SCALE_DTYPES, FourBits, Weights, columns_of, format_of
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import COLUMN_STEP, MAX_GROUPS, SCALE_BLOCK
from expertd.weight_format import WeightFormat

MIN_N_STEP = 8  # one 16-byte store of bf16
MAX_K = 2**31 - SCALE_BLOCK  # an int in kernels
MAX_ROWS = 2**31 - 1  # offsets and counts are int32
MAX_OFFSETS = 2**32 - 1  # kernels add up 32-bit offsets of scales
_ALIGNMENT = 16  # bytes; TMA requires it of a base address
_E4M3, _FP32, _BF16, _INT32 = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.int32


class Problem(NamedTuple):
    """The sizes of one grouped GEMM; m is M (contiguous) or max_m (masked)."""

    num_groups: int
    m: int
    n: int
    k: int


def check_contiguous(
    capabilities: Capabilities,
    a: Quantized,
    b: Weights,
    offsets: Tensor,
    out: Tensor | None,
    num_sms: int | None,
) -> Problem:
    """Raise ValueError (name, expected, got) unless `grouped_gemm_contiguous` can serve these arguments."""
    check_format(capabilities, "b", b)
    if a.data.ndim != 2:
        raise refusal("a shape", "2 dimensions [M, K]", tuple(a.data.shape))
    m, a_k = a.data.shape
    device = a.data.device
    num_groups, n, k = _check_weights(capabilities, b, a_k, device)
    if m > MAX_ROWS:
        raise refusal("a rows", f"at most {MAX_ROWS}", m)
    _check_data("a", a.data)
    _check_scales(a.scales, (m, k // SCALE_BLOCK), device)
    check_tensor("offsets", offsets, (num_groups + 1,), _INT32, device)
    check_num_sms(num_sms)
    if out is not None:
        check_tensor("out", out, (m, n), _BF16, device)
        check_address("out", out)
    return Problem(num_groups, m, n, k)


def check_masked(
    capabilities: Capabilities,
    a: Quantized,
    b: Weights,
    counts: Tensor,
    expected_m: int | None,
    out: Tensor | None,
    num_sms: int | None,
) -> Problem:
    """Raise ValueError (name, expected, got) unless `grouped_gemm_masked` can serve these arguments."""
    check_format(capabilities, "b", b)
    if a.data.ndim != 3:
        raise refusal("a shape", "3 dimensions [G, max_m, K]", tuple(a.data.shape))
    a_groups, max_m, a_k = a.data.shape
    device = a.data.device
    num_groups, n, k = _check_weights(capabilities, b, a_k, device)
    if a_groups != num_groups:
        raise refusal("a groups", f"{num_groups} as in b", a_groups)
    if max_m < 1:
        raise refusal("a max_m", "at least 1", max_m)
    if num_groups * max_m > MAX_ROWS:
        raise refusal("a rows", f"at most {MAX_ROWS}", num_groups * max_m)
    _check_data("a", a.data)
    _check_scales(a.scales, (num_groups, max_m, k // SCALE_BLOCK), device)
    check_tensor("counts", counts, (num_groups,), _INT32, device)
    if expected_m is not None and (not isinstance(expected_m, int) or expected_m < 1):
        raise refusal("expected_m", "None or at least 1", expected_m)
    check_num_sms(num_sms)
    if out is not None:
        check_tensor("out", out, (num_groups, max_m, n), _BF16, device)
        check_address("out", out)
    return Problem(num_groups, max_m, n, k)


def check_num_sms(num_sms: object, minimum: int = 1) -> None:
    """Raise ValueError unless it is None, or an int of at least `minimum`."""
    if num_sms is not None and (not isinstance(num_sms, int) or num_sms < minimum):
        raise refusal("num_sms", f"None or at least {minimum}", num_sms)


def check_activation(activation: Activation) -> None:
    """Raise ValueError (name, expected, got) unless experts can compute this activation."""
    if not isinstance(activation, (Swiglu, OtherGlu)):
        raise refusal("activation", "Swiglu or OtherGlu", type(activation).__name__)
    if not math.isfinite(activation.alpha):
        raise refusal("activation alpha", "a finite number", activation.alpha)
    if not activation.limit > 0:
        raise refusal("activation limit", "above 0", activation.limit)
    if isinstance(activation, OtherGlu) and not math.isfinite(activation.up_offset):
        raise refusal("activation up_offset", "a finite number", activation.up_offset)


def check_quantized(name: str, operand: object) -> None:
    """Raise ValueError unless it is Quantized."""
    if not isinstance(operand, Quantized):
        raise refusal(name, "Quantized(data, scales)", type(operand).__name__)


def check_format(capabilities: Capabilities, name: str, operand: object) -> None:
    """Raise ValueError unless it is weights, of a format that the backend takes."""
    if not isinstance(operand, (Quantized, FourBits)):
        raise refusal(name, "Quantized(data, scales) or FourBits", type(operand).__name__)
    has = format_of(operand)
    if has is WeightFormat.FP8 and isinstance(operand, FourBits):
        raise refusal(f"{name} format", "one of four bits for FourBits", has)
    if has not in capabilities.weight_formats:
        takes = " or ".join(sorted(capabilities.weight_formats))
        raise refusal(f"{name} format", takes, f"{has}, which backend {taking(has)} takes")


def check_weights(
    capabilities: Capabilities,
    name: str,
    weights: Weights,
    shape: tuple[int, int, int],
    device: torch.device,
    like: str = "a",
) -> None:
    """Raise ValueError unless weights of `shape` [G, N, K] have what their format needs, on `device`."""
    (num_groups, n, k), data_device = shape, _device_of_data(capabilities, weights, device)
    scales = f"{name} scales"
    if isinstance(weights, Quantized):
        check_tensor(name, weights.data, shape, _E4M3, data_device, like)
        check_address(name, weights.data)
        blocks = (num_groups, -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
        check_tensor(scales, weights.scales, blocks, _FP32, device, like)
        return
    check_tensor(name, weights.data, (num_groups, n, k // 2), torch.uint8, data_device, like)
    check_address(name, weights.data)
    _check_groups(name, weights, k)
    groups = (num_groups, n, k // weights.group_size)
    dtypes = SCALE_DTYPES[weights.format]
    if weights.scales.dtype not in dtypes:
        raise refusal(f"{scales} dtype", " or ".join(map(str, dtypes)), weights.scales.dtype)
    if data_device.type == "meta" and weights.scales.is_meta:  # both only keys to what calls read
        device = data_device
    check_tensor(scales, weights.scales, groups, weights.scales.dtype, device, like)
    check_address(scales, weights.scales)
    if (weights.format is WeightFormat.NVFP4) != (weights.whole is not None):
        expected = "fp32 [G, N]" if weights.whole is None else f"None for {weights.format}"
        raise refusal(f"{name} whole", expected, "None" if weights.whole is None else "a tensor")
    if weights.whole is not None:
        check_tensor(f"{name} whole", weights.whole, (num_groups, n), _FP32, device, like)


def _check_groups(name: str, weights: FourBits, k: int) -> None:
    """Raise ValueError unless scales stand for as many columns as they may, and these make up all K."""
    if k % COLUMN_STEP != 0:
        raise refusal(f"{name} K", f"a multiple of {COLUMN_STEP} for {weights.format}", k)
    counts = [k // size for size in weights.format.group_sizes if k % size == 0]
    got = weights.scales.shape[-1] if weights.scales.ndim else 0
    if got not in counts:
        sizes = " or ".join(map(str, weights.format.group_sizes))
        raise refusal(f"{name} scales columns", f"one for {sizes} of {k} columns", got)


def _check_weights(
    capabilities: Capabilities, weights: Weights, a_k: int, device: torch.device
) -> tuple[int, int, int]:
    b = weights.data
    if b.ndim != 3:
        raise refusal("b shape", "3 dimensions [G, N, K]", tuple(b.shape))
    num_groups, n, k = b.shape[0], b.shape[1], columns_of(weights)
    if a_k != k:
        raise refusal("a K", f"{k} as in b", a_k)
    if k < SCALE_BLOCK or k % SCALE_BLOCK != 0:
        raise refusal("K", f"a multiple of {SCALE_BLOCK}, at least {SCALE_BLOCK}", k)
    if k > MAX_K:
        raise refusal("K", f"at most {MAX_K}", k)
    if n < MIN_N_STEP or n % MIN_N_STEP != 0:
        raise refusal("N", f"a multiple of {MIN_N_STEP}, at least {MIN_N_STEP}", n)
    if n > capabilities.max_n:
        raise refusal("N", f"at most {capabilities.max_n}", n)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise refusal("b groups", f"1 to {MAX_GROUPS}", num_groups)
    check_weights(capabilities, "b", weights, (num_groups, n, k), device)
    return num_groups, n, k


def _device_of_data(capabilities: Capabilities, weights: Weights, device: torch.device) -> torch.device:
    """Where weights have to be for tokens on `device`; those of `Backend.packed` may lack data."""
    may_lack = format_of(weights) in capabilities.packs and device.type == (capabilities.device_type or "cpu")
    return weights.data.device if weights.data.is_meta and may_lack else device


def _check_data(name: str, data: Tensor) -> None:
    if data.dtype != _E4M3:
        raise refusal(f"{name} dtype", _E4M3, data.dtype)
    if not data.is_contiguous():
        raise refusal(f"{name} strides", "contiguous", data.stride())
    check_address(name, data)


def _check_scales(scales: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if scales.shape != shape:
        raise refusal("a scales shape", shape, tuple(scales.shape))
    if scales.dtype != _FP32:
        raise refusal("a scales dtype", _FP32, scales.dtype)
    strides = scales.stride()
    if 1 not in strides[-2:]:
        raise refusal("a scales strides", "row- or column-major (1 in one of the last two)", strides)
    if sum(map(mul, shape, strides)) > MAX_OFFSETS:
        raise refusal("a scales strides", f"at most {MAX_OFFSETS} elements apart in all", strides)
    if scales.device != device:
        raise refusal("a scales device", f"{device} as a", scales.device)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    like: str = "a",
) -> None:
    """Raise ValueError unless the tensor is contiguous and so; `like` names one on the same device."""
    if tensor.shape != shape:
        raise refusal(f"{name} shape", shape, tuple(tensor.shape))
    if tensor.dtype != dtype:
        raise refusal(f"{name} dtype", dtype, tensor.dtype)
    if not tensor.is_contiguous():
        raise refusal(f"{name} strides", "contiguous", tensor.stride())
    if tensor.device != device:
        raise refusal(f"{name} device", f"{device} as {like}", tensor.device)


def check_address(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is aligned to 16 bytes."""
    past = tensor.data_ptr() % _ALIGNMENT
    if past != 0:
        raise refusal(f"{name} address", f"a multiple of {_ALIGNMENT} bytes", f"{past} bytes past one")


def refusal(what: str, expected: object, got: object) -> ValueError:
    """Built only when it is raised: formatting it on every call would cost more than the checks."""
    return ValueError(f"{what}: expected {expected}, got {got}")
