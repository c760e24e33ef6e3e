"""Checks the arguments of the operations in this folder: metadata only, as in kernels/checks.py."""

import torch
from torch import Tensor

from expertd.kernels.checks import MAX_ROWS, refusal
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import SCALE_BLOCK
from expertd.routing import Routing

_FLOATS = torch.float32, torch.bfloat16, torch.float16
_INDICES = torch.int64, torch.int32


def check_logits(logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing) -> None:
    """Raise ValueError (name, expected, got) unless `choose_experts` can serve these arguments."""
    if logits.ndim != 2:
        raise refusal("logits shape", "2 dimensions [T, E]", tuple(logits.shape))
    _check_dtype("logits", logits, torch.float32)
    _check_rule(logits.shape[1], bias, top_k, routing)
    if bias is not None:
        _check_device("bias", bias, logits, "logits")


def check_router(
    hidden_states: Tensor, router: Tensor, bias: Tensor | None, top_k: int, routing: Routing
) -> None:
    """Raise ValueError (name, expected, got) unless `Backend.route` can serve these arguments."""
    for name, tensor, form in (("hidden_states", hidden_states, "[T, H]"), ("router", router, "[E, H]")):
        if tensor.ndim != 2:
            raise refusal(f"{name} shape", f"2 dimensions {form}", tuple(tensor.shape))
    num_experts, h = router.shape
    if h != hidden_states.shape[1]:
        raise refusal("router H", f"{hidden_states.shape[1]} as in hidden_states", h)
    _check_device("router", router, hidden_states, "hidden_states")
    _check_rule(num_experts, bias, top_k, routing)
    if bias is not None:
        _check_device("bias", bias, hidden_states, "hidden_states")


def _check_rule(num_experts: int, bias: Tensor | None, top_k: int, routing: Routing) -> None:
    if top_k < 1:
        raise refusal("top_k", "at least 1", top_k)
    routing.check(num_experts, top_k)
    if bias is not None:
        _check_shape("bias", bias, (num_experts,))
        _check_dtype("bias", bias, torch.float32)


def check_group_ids(group_ids: Tensor, num_groups: int) -> None:
    """Raise ValueError (name, expected, got) unless `compute_permutation` can serve these arguments."""
    if group_ids.ndim != 2 or group_ids.shape[1] < 1:
        raise refusal("group_ids shape", "2 dimensions [T, top_k], top_k at least 1", tuple(group_ids.shape))
    _check_dtype("group_ids", group_ids, torch.int32)
    if group_ids.numel() > MAX_ROWS:
        raise refusal("group_ids rows", f"at most {MAX_ROWS}", group_ids.numel())
    if num_groups < 1:
        raise refusal("num_groups", "at least 1", num_groups)


def check_permute(rows: Quantized, token_ids: Tensor) -> None:
    """Raise ValueError (name, expected, got) unless `permute_rows` can serve these arguments."""
    if not isinstance(rows, Quantized):
        raise refusal("rows", "Quantized(data, scales)", type(rows).__name__)
    data, scales = rows
    if data.ndim != 2 or data.shape[1] % SCALE_BLOCK != 0:
        expected = f"2 dimensions [T, K], K a multiple of {SCALE_BLOCK}"
        raise refusal("rows shape", expected, tuple(data.shape))
    _check_dtype("rows", data, torch.float8_e4m3fn)
    _check_shape("rows scales", scales, (data.shape[0], data.shape[1] // SCALE_BLOCK))
    _check_dtype("rows scales", scales, torch.float32)
    if token_ids.ndim != 1:
        raise refusal("token_ids shape", "1 dimension [R]", tuple(token_ids.shape))
    _check_dtype("token_ids", token_ids, *_INDICES)
    for name, tensor in (("rows scales", scales), ("token_ids", token_ids)):
        _check_device(name, tensor, data)


def check_unpermute(
    rows: Tensor,
    inverse_permutation: Tensor,
    topk_weights: Tensor,
    absent: Tensor | None,
    out: Tensor | None,
) -> None:
    """Raise ValueError (name, expected, got) unless `unpermute_rows` can serve these arguments."""
    if rows.ndim != 2:
        raise refusal("rows shape", "2 dimensions [R, H]", tuple(rows.shape))
    if topk_weights.ndim != 2:
        raise refusal("topk_weights shape", "2 dimensions [T, top_k]", tuple(topk_weights.shape))
    size = tuple(topk_weights.shape)
    _check_dtype("topk_weights", topk_weights, torch.float32)
    _check_shape("inverse_permutation", inverse_permutation, size)
    _check_dtype("inverse_permutation", inverse_permutation, *_INDICES)
    _check_device("inverse_permutation", inverse_permutation, rows)
    _check_device("topk_weights", topk_weights, rows)
    if absent is not None:
        _check_shape("absent", absent, size)
        _check_dtype("absent", absent, torch.bool)
        _check_device("absent", absent, rows)
    if out is not None:
        _check_shape("out", out, (size[0], rows.shape[1]))
        _check_device("out", out, rows)


def check_gate_up(gate_up: Tensor) -> None:
    """Raise ValueError (name, expected, got) unless `swiglu` can serve this argument."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 != 0:
        raise refusal("gate_up shape", "2 dimensions [rows, 2I]", tuple(gate_up.shape))
    _check_dtype("gate_up", gate_up, *_FLOATS)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise refusal(f"{name} shape", shape, tuple(tensor.shape))


def _check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise refusal(f"{name} dtype", " or ".join(map(str, dtypes)), tensor.dtype)


def _check_device(name: str, tensor: Tensor, other: Tensor, like: str = "rows") -> None:
    if tensor.device != other.device:
        raise refusal(f"{name} device", f"{other.device} as {like}", tensor.device)
