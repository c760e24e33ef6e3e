"""Checks the arguments of grouped GEMMs and of experts: metadata only, nothing here reads elements."""

import math
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from expertd.activation import Activation, OtherGlu, Swiglu
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.quantize import HiddenStates, Quantized, values_of
from expertd.limits import HIDDEN_STEP, MAX_EXPERTS, MAX_GROUPS, SCALE_BLOCK

if TYPE_CHECKING:
    from expertd.kernels.rank_memory import RankMemory, RankTokens

MIN_N_STEP = 8  # one 16-byte store of bf16
MAX_N = 2**23  # 2**18 columns of the narrowest tiles: with more, csrc/scheduler.cuh divides inexactly
MAX_ROWS = 2**31 - 1  # offsets and counts are int32
_MAX_OFFSETS = 2**32 - 1  # kernels add up 32-bit offsets of scales
_ALIGNMENT = 16  # bytes; TMA requires it of a base address
_E4M3, _FP32, _BF16, _INT32 = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.int32
_HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Problem(NamedTuple):
    """The sizes of one grouped GEMM; m is M (contiguous) or max_m (masked)."""

    num_groups: int
    m: int
    n: int
    k: int


def check_contiguous(
    a: Quantized, b: Quantized, offsets: Tensor, out: Tensor | None, num_sms: int | None
) -> Problem:
    """Raise ValueError (name, expected, got) unless `grouped_gemm_contiguous` can serve these arguments."""
    _check_quantized("a", a)
    _check_quantized("b", b)
    if a.data.ndim != 2:
        raise refusal("a shape", "2 dimensions [M, K]", tuple(a.data.shape))
    m, a_k = a.data.shape
    device = a.data.device
    num_groups, n, k = _check_weights(b, a_k, device)
    if m > MAX_ROWS:
        raise refusal("a rows", f"at most {MAX_ROWS}", m)
    _check_data("a", a.data)
    _check_scales(a.scales, (m, k // SCALE_BLOCK), device)
    _check("offsets", offsets, (num_groups + 1,), _INT32, device)
    _check_num_sms(num_sms)
    if out is not None:
        _check("out", out, (m, n), _BF16, device)
        _check_address("out", out)
    return Problem(num_groups, m, n, k)


def check_masked(
    a: Quantized,
    b: Quantized,
    counts: Tensor,
    expected_m: int | None,
    out: Tensor | None,
    num_sms: int | None,
) -> Problem:
    """Raise ValueError (name, expected, got) unless `grouped_gemm_masked` can serve these arguments."""
    _check_quantized("a", a)
    _check_quantized("b", b)
    if a.data.ndim != 3:
        raise refusal("a shape", "3 dimensions [G, max_m, K]", tuple(a.data.shape))
    a_groups, max_m, a_k = a.data.shape
    device = a.data.device
    num_groups, n, k = _check_weights(b, a_k, device)
    if a_groups != num_groups:
        raise refusal("a groups", f"{num_groups} as in b", a_groups)
    if max_m < 1:
        raise refusal("a max_m", "at least 1", max_m)
    if num_groups * max_m > MAX_ROWS:
        raise refusal("a rows", f"at most {MAX_ROWS}", num_groups * max_m)
    _check_data("a", a.data)
    _check_scales(a.scales, (num_groups, max_m, k // SCALE_BLOCK), device)
    _check("counts", counts, (num_groups,), _INT32, device)
    if expected_m is not None and (not isinstance(expected_m, int) or expected_m < 1):
        raise refusal("expected_m", "None or at least 1", expected_m)
    _check_num_sms(num_sms)
    if out is not None:
        _check("out", out, (num_groups, max_m, n), _BF16, device)
        _check_address("out", out)
    return Problem(num_groups, max_m, n, k)


def check_experts(
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Quantized,
    down: Quantized,
    out: Tensor | None,
    activation: Activation,
    num_sms: int | None,
    offsets: Tensor | None = None,
    biases: ExpertBiases | None = None,
) -> None:
    """Raise ValueError (name, expected, got) unless `fused_experts` can serve these arguments."""
    rows, is_fp8 = values_of(hidden_states), isinstance(hidden_states, Quantized)
    if rows.ndim != 2:
        raise refusal("hidden_states shape", "2 dimensions [T, H]", tuple(rows.shape))
    dtypes = (_E4M3,) if is_fp8 else _HIDDEN_DTYPES
    if rows.dtype not in dtypes:
        raise refusal("hidden_states dtype", " or ".join(map(str, dtypes)), rows.dtype)
    _check_quantized("gate_up", gate_up)
    _check_quantized("down", down)
    check_activation(activation)
    if biases is not None and not isinstance(biases, ExpertBiases):
        raise refusal("biases", "None or ExpertBiases(gate_up, down)", type(biases).__name__)
    if down.data.ndim != 3:
        raise refusal("down shape", "3 dimensions [G, H, I]", tuple(down.data.shape))
    device, like = rows.device, "hidden_states"
    (num_tokens, h), (num_groups, _, i) = rows.shape, down.data.shape
    for name, size, step in (("H", h, SCALE_BLOCK if is_fp8 else HIDDEN_STEP), ("I", i, SCALE_BLOCK)):
        if size < SCALE_BLOCK or size % step != 0:
            raise refusal(name, f"a multiple of {step}, at least {SCALE_BLOCK}", size)
        if size > MAX_N:
            raise refusal(name, f"at most {MAX_N}", size)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise refusal("down groups", f"1 to {MAX_GROUPS}", num_groups)
    if isinstance(hidden_states, Quantized):
        _check_token_scales(hidden_states.scales, (num_tokens, h // SCALE_BLOCK), device)
    for name, (data, scales), n, k in (("gate_up", gate_up, 2 * i, h), ("down", down, h, i)):
        _check(name, data, (num_groups, n, k), _E4M3, _device_of_weights(data, device), like)
        _check_address(name, data)
        blocks = (num_groups, -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK))
        _check(f"{name} scales", scales, blocks, _FP32, device, like)
    for name, bias, n in (
        () if biases is None else (("gate_up", biases.gate_up, 2 * i), ("down", biases.down, h))
    ):
        _check(f"{name} bias", bias, (num_groups, n), _BF16, device, like)
        _check_address(f"{name} bias", bias)
    if topk_ids.ndim != 2:
        raise refusal("topk_ids shape", "2 dimensions [T, top_k]", tuple(topk_ids.shape))
    top_k = topk_ids.shape[1]
    if top_k < 1:
        raise refusal("topk_ids top_k", "at least 1", top_k)
    if num_tokens * top_k > MAX_ROWS:
        raise refusal("topk_ids rows", f"at most {MAX_ROWS}", num_tokens * top_k)
    _check("topk_ids", topk_ids, (num_tokens, top_k), _INT32, device, like)
    _check("topk_weights", topk_weights, (num_tokens, top_k), _FP32, device, like)
    _check_num_sms(num_sms)
    if out is not None:
        if out.dtype not in _HIDDEN_DTYPES:
            raise refusal("out dtype", " or ".join(map(str, _HIDDEN_DTYPES)), out.dtype)
        _check("out", out, (num_tokens, h), out.dtype, device, like)
        _check_address("out", out)
    if offsets is not None:
        of_host = offsets.is_cpu and (device.type == "cpu" or offsets.is_pinned())
        where = offsets.device if of_host else device
        _check("offsets", offsets, (num_groups + 1,), _INT32, where, like)


def check_parallel(
    memory: "RankMemory",
    tokens: "RankTokens",
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    out: Tensor,
    num_sms: int | None,
    has_overlap: bool,
) -> None:
    """Raise ValueError (name, expected, got) unless these arguments of a rank suit `memory` and `tokens`."""
    rows = values_of(hidden_states)
    (num_tokens, h), device, like = rows.shape, rows.device, "hidden_states"
    if h != memory.hidden_size:
        raise refusal("hidden_states H", f"{memory.hidden_size} as in memory", h)
    memory.check(tokens.counts)
    if num_tokens != tokens.counts[memory.rank]:
        expected = f"{tokens.counts[memory.rank]} as in tokens.counts[{memory.rank}]"
        raise refusal("hidden_states tokens", expected, num_tokens)
    if topk_ids.shape != (num_tokens, memory.top_k):
        expected = f"({num_tokens}, {memory.top_k}), with the top_k of memory"
        raise refusal("topk_ids shape", expected, tuple(topk_ids.shape))
    places = tokens.places
    if places.ndim != 1 or not 1 <= len(places) <= MAX_EXPERTS:
        raise refusal("places shape", f"1 to {MAX_EXPERTS} experts [E]", tuple(places.shape))
    _check("places", places, tuple(places.shape), _INT32, device, like)
    if out.dtype not in _HIDDEN_DTYPES:
        raise refusal("out dtype", " or ".join(map(str, _HIDDEN_DTYPES)), out.dtype)
    _check("out", out, (num_tokens, h), out.dtype, device, like)
    _check_address("out", out)
    if num_sms is not None and has_overlap:
        raise refusal("num_sms", "None with an overlap", num_sms)
    _check_num_sms(num_sms, 2)


def _check_num_sms(num_sms: object, least: int = 1) -> None:
    if num_sms is not None and (not isinstance(num_sms, int) or num_sms < least):
        raise refusal("num_sms", f"None or at least {least}", num_sms)


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


def _check_quantized(name: str, operand: object) -> None:
    if not isinstance(operand, Quantized):
        raise refusal(name, "Quantized(data, scales)", type(operand).__name__)


def _check_weights(weights: Quantized, a_k: int, device: torch.device) -> tuple[int, int, int]:
    b, b_scales = weights
    if b.ndim != 3:
        raise refusal("b shape", "3 dimensions [G, N, K]", tuple(b.shape))
    num_groups, n, k = b.shape
    if a_k != k:
        raise refusal("a K", f"{k} as in b", a_k)
    if k < SCALE_BLOCK or k % SCALE_BLOCK != 0:
        raise refusal("K", f"a multiple of {SCALE_BLOCK}, at least {SCALE_BLOCK}", k)
    if n < MIN_N_STEP or n % MIN_N_STEP != 0:
        raise refusal("N", f"a multiple of {MIN_N_STEP}, at least {MIN_N_STEP}", n)
    if n > MAX_N:
        raise refusal("N", f"at most {MAX_N}", n)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise refusal("b groups", f"1 to {MAX_GROUPS}", num_groups)
    _check_data("b", b)
    if b.device != _device_of_weights(b, device):
        raise refusal("b device", f"{device} as a", b.device)
    _check("b scales", b_scales, (num_groups, -(-n // SCALE_BLOCK), k // SCALE_BLOCK), _FP32, device)
    return num_groups, n, k


def _device_of_weights(data: Tensor, device: torch.device) -> torch.device:
    """Where weights have to be for tokens on `device`; on a CPU, those of `Backend.packed` have no data."""
    return data.device if data.is_meta and device.type == "cpu" else device


def _check_data(name: str, data: Tensor) -> None:
    if data.dtype != _E4M3:
        raise refusal(f"{name} dtype", _E4M3, data.dtype)
    if not data.is_contiguous():
        raise refusal(f"{name} strides", "contiguous", data.stride())
    _check_address(name, data)


def _check_scales(scales: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if scales.shape != shape:
        raise refusal("a scales shape", shape, tuple(scales.shape))
    if scales.dtype != _FP32:
        raise refusal("a scales dtype", _FP32, scales.dtype)
    strides = scales.stride()
    if 1 not in strides[-2:]:
        raise refusal("a scales strides", "row- or column-major (1 in one of the last two)", strides)
    if sum(map(mul, shape, strides)) > _MAX_OFFSETS:
        raise refusal("a scales strides", f"at most {_MAX_OFFSETS} elements apart in all", strides)
    if scales.device != device:
        raise refusal("a scales device", f"{device} as a", scales.device)


def _check_token_scales(scales: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    if scales.shape != shape:
        raise refusal("hidden_states scales shape", shape, tuple(scales.shape))
    if scales.dtype != _FP32:
        raise refusal("hidden_states scales dtype", _FP32, scales.dtype)
    if max(scales.stride()) > _MAX_OFFSETS:
        raise refusal("hidden_states scales strides", f"at most {_MAX_OFFSETS} each", scales.stride())
    if scales.device != device:
        raise refusal("hidden_states scales device", f"{device} as hidden_states", scales.device)


def _check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    like: str = "a",
) -> None:
    if tensor.shape != shape:
        raise refusal(f"{name} shape", shape, tuple(tensor.shape))
    if tensor.dtype != dtype:
        raise refusal(f"{name} dtype", dtype, tensor.dtype)
    if not tensor.is_contiguous():
        raise refusal(f"{name} strides", "contiguous", tensor.stride())
    if tensor.device != device:
        raise refusal(f"{name} device", f"{device} as {like}", tensor.device)


def _check_address(name: str, tensor: Tensor) -> None:
    past = tensor.data_ptr() % _ALIGNMENT
    if past != 0:
        raise refusal(f"{name} address", f"a multiple of {_ALIGNMENT} bytes", f"{past} bytes past one")


def refusal(what: str, expected: object, got: object) -> ValueError:
    """Built only when it is raised: formatting it on every call would cost more than the checks."""
    return ValueError(f"{what}: expected {expected}, got {got}")
