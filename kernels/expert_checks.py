"""Checks the arguments of experts, of one rank and of several: metadata only, as in checks.py."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from expertd.activation import Activation
from expertd.backends import Capabilities
from expertd.kernels.checks import (
    MAX_OFFSETS,
    MAX_ROWS,
    check_activation,
    check_address,
    check_format,
    check_num_sms,
    check_tensor,
    check_weights,
    refusal,
)
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import Weights, columns_of
from expertd.kernels.ops.parts import ExpertPart, GroupTable
from expertd.kernels.ops.quantize import HiddenStates, Quantized, values_of
from expertd.kernels.rank_memory import RankMemory, RankTokens
from expertd.limits import MAX_EXPERTS, MAX_GROUPS, SCALE_BLOCK

_E4M3, _FP32, _BF16, _INT32 = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.int32
_HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIKE = "hidden_states"  # all tensors are on its device


def check_experts(
    capabilities: Capabilities,
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Weights,
    down: Weights,
    out: Tensor | None,
    activation: Activation,
    num_sms: int | None,
    offsets: Tensor | None = None,
    biases: ExpertBiases | None = None,
) -> None:
    """Raise ValueError (name, expected, got) unless `fused_experts` can serve these arguments."""
    num_tokens, h, device = _check_hidden_states(capabilities, hidden_states)
    check_activation(activation)
    num_groups = _check_experts(capabilities, gate_up, down, biases, h, device)
    _check_routing(topk_ids, topk_weights, num_tokens, device)
    check_num_sms(num_sms)
    if out is not None:
        _check_out(out, (num_tokens, h), device)
    if offsets is not None:
        _check_offsets(offsets, num_groups, device)


def check_experts_in_parts(
    capabilities: Capabilities,
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_groups: int,
    out: Tensor | None,
    activation: Activation,
    num_sms: int | None,
    offsets: Tensor | None = None,
    table: GroupTable | None = None,
) -> None:
    """Raise ValueError (name, expected, got) unless `fused_experts_in_parts` can serve these arguments."""
    num_tokens, h, device = _check_hidden_states(capabilities, hidden_states)
    check_activation(activation)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise refusal("num_groups", f"1 to {MAX_GROUPS}", num_groups)
    _check_routing(topk_ids, topk_weights, num_tokens, device)
    check_num_sms(num_sms)
    if out is not None:
        _check_out(out, (num_tokens, h), device)
    if offsets is not None:
        _check_offsets(offsets, num_groups, device)
    if table is not None:
        _check_table(table, topk_ids.numel(), device)


def checked_parts(
    capabilities: Capabilities, parts: Iterable[ExpertPart], num_groups: int, h: int, device: torch.device
) -> Iterator[ExpertPart]:
    """The parts, each checked when it comes; ValueError unless they have `num_groups` in all."""
    count, last = 0, None
    for part in parts:
        if part is not last:  # which often comes twice
            size = _check_experts(capabilities, *part, h, device)
            if last is not None and (last.biases is None) != (part.biases is None):
                expected = "none" if last.biases is None else "some"
                raise refusal("parts biases", f"{expected} as in the part before", "others")
            last = part
        count += size
        if count > num_groups:
            break
        yield part
    if count != num_groups:
        raise refusal("parts groups", f"{num_groups} in all", count)


def check_parallel(
    capabilities: Capabilities,
    memory: RankMemory,
    tokens: RankTokens,
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Weights,
    down: Weights,
    out: Tensor,
    activation: Activation,
    num_sms: int | None,
    offsets: Tensor | None = None,
    biases: ExpertBiases | None = None,
    has_overlap: bool = False,
) -> None:
    """Raise ValueError (name, expected, got) unless these arguments of a rank suit `memory` and `tokens`."""
    h, device = _check_tokens_of_rank(
        capabilities, memory, tokens, hidden_states, topk_ids, topk_weights, out
    )
    check_activation(activation)
    num_groups = _check_experts(capabilities, gate_up, down, biases, h, device, len(tokens.places))
    if num_sms is not None and has_overlap:
        raise refusal("num_sms", "None with an overlap", num_sms)
    check_num_sms(num_sms, 2)
    if offsets is not None:
        _check_offsets(offsets, num_groups, device)


def check_parallel_in_parts(
    capabilities: Capabilities,
    memory: RankMemory,
    tokens: RankTokens,
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_groups: int,
    out: Tensor,
    activation: Activation,
    num_sms: int | None,
    offsets: Tensor,
    down_bias: Tensor | None,
) -> None:
    """As `check_parallel`, of a rank whose weights come in parts, which `checked_parts` looks at."""
    h, device = _check_tokens_of_rank(
        capabilities, memory, tokens, hidden_states, topk_ids, topk_weights, out
    )
    check_activation(activation)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise refusal("num_groups", f"1 to {MAX_GROUPS}", num_groups)
    check_num_sms(num_sms, 2)
    if not _is_for_host(offsets, device):
        raise refusal("offsets device", "pinned memory of the host", offsets.device)
    _check_offsets(offsets, num_groups, device)
    if down_bias is not None:
        _check_bias("down", down_bias, (len(tokens.places), h), device)


def _check_tokens_of_rank(
    capabilities: Capabilities,
    memory: RankMemory,
    tokens: RankTokens,
    hidden_states: HiddenStates,
    topk_ids: Tensor,
    topk_weights: Tensor,
    out: Tensor,
) -> tuple[int, torch.device]:
    """The tokens' columns, and the device."""
    num_tokens, h, device = _check_hidden_states(capabilities, hidden_states)
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
    check_tensor("places", places, tuple(places.shape), _INT32, device, _LIKE)
    _check_routing(topk_ids, topk_weights, num_tokens, device)
    _check_out(out, (num_tokens, h), device)
    return h, device


def _check_hidden_states(
    capabilities: Capabilities, hidden_states: HiddenStates
) -> tuple[int, int, torch.device]:
    """The tokens, their columns, and the device."""
    rows, is_fp8 = values_of(hidden_states), isinstance(hidden_states, Quantized)
    if rows.ndim != 2:
        raise refusal("hidden_states shape", "2 dimensions [T, H]", tuple(rows.shape))
    dtypes = (_E4M3,) if is_fp8 else _HIDDEN_DTYPES
    if rows.dtype not in dtypes:
        raise refusal("hidden_states dtype", " or ".join(map(str, dtypes)), rows.dtype)
    num_tokens, h = rows.shape
    _check_size(capabilities, "H", h, SCALE_BLOCK if is_fp8 else capabilities.hidden_step)
    if isinstance(hidden_states, Quantized):
        _check_token_scales(hidden_states.scales, (num_tokens, h // SCALE_BLOCK), rows.device)
    return num_tokens, h, rows.device


def _check_size(capabilities: Capabilities, name: str, size: int, step: int) -> None:
    if size < SCALE_BLOCK or size % step != 0:
        raise refusal(name, f"a multiple of {step}, at least {SCALE_BLOCK}", size)
    if size > capabilities.max_n:
        raise refusal(name, f"at most {capabilities.max_n}", size)


def _check_experts(
    capabilities: Capabilities,
    gate_up: Weights,
    down: Weights,
    biases: ExpertBiases | None,
    h: int,
    device: torch.device,
    num_experts: int | None = None,
) -> int:
    """The number of groups; num_experts: of all ranks, for which biases.down is. None: there is one rank."""
    check_format(capabilities, "gate_up", gate_up)
    check_format(capabilities, "down", down)
    if biases is not None and not isinstance(biases, ExpertBiases):
        raise refusal("biases", "None or ExpertBiases(gate_up, down)", type(biases).__name__)
    if down.data.ndim != 3:
        raise refusal("down shape", "3 dimensions [G, H, I]", tuple(down.data.shape))
    num_groups, i = down.data.shape[0], columns_of(down)
    _check_size(capabilities, "I", i, SCALE_BLOCK)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise refusal("down groups", f"1 to {MAX_GROUPS}", num_groups)
    check_weights(capabilities, "gate_up", gate_up, (num_groups, 2 * i, h), device, _LIKE)
    check_weights(capabilities, "down", down, (num_groups, h, i), device, _LIKE)
    if biases is not None:
        _check_bias("gate_up", biases.gate_up, (num_groups, 2 * i), device)
        _check_bias("down", biases.down, (num_experts or num_groups, h), device)
    return num_groups


def _check_bias(name: str, bias: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    check_tensor(f"{name} bias", bias, shape, _BF16, device, _LIKE)
    check_address(f"{name} bias", bias)


def _check_routing(topk_ids: Tensor, topk_weights: Tensor, num_tokens: int, device: torch.device) -> None:
    if topk_ids.ndim != 2:
        raise refusal("topk_ids shape", "2 dimensions [T, top_k]", tuple(topk_ids.shape))
    top_k = topk_ids.shape[1]
    if top_k < 1:
        raise refusal("topk_ids top_k", "at least 1", top_k)
    if num_tokens * top_k > MAX_ROWS:
        raise refusal("topk_ids rows", f"at most {MAX_ROWS}", num_tokens * top_k)
    check_tensor("topk_ids", topk_ids, (num_tokens, top_k), _INT32, device, _LIKE)
    check_tensor("topk_weights", topk_weights, (num_tokens, top_k), _FP32, device, _LIKE)


def _check_out(out: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    if out.dtype not in _HIDDEN_DTYPES:
        raise refusal("out dtype", " or ".join(map(str, _HIDDEN_DTYPES)), out.dtype)
    check_tensor("out", out, shape, out.dtype, device, _LIKE)
    check_address("out", out)


def _check_offsets(offsets: Tensor, num_groups: int, device: torch.device) -> None:
    place = offsets.device if _is_for_host(offsets, device) else device
    check_tensor("offsets", offsets, (num_groups + 1,), _INT32, place, _LIKE)


def _check_table(table: GroupTable, num_ids: int, device: torch.device) -> None:
    groups, seen = table
    if groups.ndim != 1 or not 1 <= len(groups) <= MAX_GROUPS:
        raise refusal("table groups shape", f"1 to {MAX_GROUPS} ids [N]", tuple(groups.shape))
    check_tensor("table groups", groups, tuple(groups.shape), _INT32, device, _LIKE)
    if not _is_for_host(seen, device):
        raise refusal("table seen device", "pinned memory of the host", seen.device)
    if seen.ndim != 1 or len(seen) < 1 + num_ids:
        raise refusal("table seen shape", f"at least {1 + num_ids}, in one dimension", tuple(seen.shape))
    check_tensor("table seen", seen, tuple(seen.shape), _INT32, seen.device, _LIKE)


def _is_for_host(tensor: Tensor, device: torch.device) -> bool:
    """Whether the host, and the device, can use it in the host's memory."""
    return tensor.is_cpu and (device.type == "cpu" or tensor.is_pinned())


def _check_token_scales(scales: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    if scales.shape != shape:
        raise refusal("hidden_states scales shape", shape, tuple(scales.shape))
    if scales.dtype != _FP32:
        raise refusal("hidden_states scales dtype", _FP32, scales.dtype)
    if max(scales.stride()) > MAX_OFFSETS:
        raise refusal("hidden_states scales strides", f"at most {MAX_OFFSETS} each", scales.stride())
    if scales.device != device:
        raise refusal("hidden_states scales device", f"{device} as hidden_states", scales.device)
