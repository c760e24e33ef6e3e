"""Encodes weights as checkpoints do, one number at a time in the order that their formats say.

An encoder returns the tensors of a weight [n, k] by what follows its name, and the numbers that they mean.
"""

from collections.abc import Callable

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Encoder = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def bf16(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As it is, without a quantization."""
    stored = weight.to(torch.bfloat16)
    return {".weight": stored}, stored.float()


def _spread(scales: Tensor, columns: int) -> Tensor:
    return scales.repeat_interleave(columns // scales.shape[1], dim=1)


def _largest(weight: Tensor, size: int) -> Tensor:
    """Of each `size` columns in a row."""
    return weight.abs().view(weight.shape[0], -1, size).amax(2)


def _powers(scales: Tensor) -> Tensor:
    """Rounded up to powers of two, in e8m0."""
    return torch.exp2(scales.log2().ceil()).to(torch.float8_e8m0fnu)


def fp8_by_block(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -k % 128, 0, -n % 128))
    scales = padded.view(-(-n // 128), 128, -(-k // 128), 128).amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    data = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": data, ".weight_scale": scales}, data.float() * spread


def fp8_by_row(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    data = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": data, ".weight_scale": scales}, data.float() * scales.float()


def fp8_by_tensor(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / 448
    data = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": data, ".weight_scale": scale.clone(), ".input_scale": torch.tensor(0.5)}
    return tensors, data.float() * scale


def mxfp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = _powers(_largest(weight, 32) / 448)
    data = (weight / _spread(scales.float(), weight.shape[1])).to(torch.float8_e4m3fn)
    values = data.float() * _spread(scales.float(), weight.shape[1])
    return {".weight": data, ".weight_scale": scales.view(torch.uint8)}, values


def _codes(scaled: Tensor) -> Tensor:
    """The nearest of the 16 numbers, as its code."""
    nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    return (nearest + 8 * (scaled < 0)).to(torch.uint8)


def _decoded(codes: Tensor) -> Tensor:
    return torch.where(codes >= 8, -1.0, 1.0) * E2M1[(codes % 8).long()]


def _in_bytes(codes: Tensor) -> Tensor:
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = _powers(_largest(weight, 32) / 6)
    spread = _spread(scales.float(), weight.shape[1])
    codes = _codes(weight / spread)
    packed = _in_bytes(codes).view(torch.int8)
    return {".weight": packed, ".scale": scales}, _decoded(codes) * spread


def _nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(packed, scales, the scale of all, values)"""
    whole = weight.abs().max() / (6 * 448)
    scales = (_largest(weight, 16) / 6 / whole).to(torch.float8_e4m3fn)
    spread = _spread(scales.float() * whole, weight.shape[1])
    codes = _codes(weight / spread.clamp(min=1e-30))
    return _in_bytes(codes), scales, whole, _decoded(codes) * spread


def nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    packed, scales, whole, values = _nvfp4(weight)
    tensors = {".weight": packed, ".weight_scale": scales, ".weight_scale_2": whole.clone()}
    return tensors | {".input_scale": torch.tensor(1.0)}, values


def nvfp4_packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    packed, scales, whole, _ = _nvfp4(weight)
    whole = (1 / whole).reshape(1)
    codes = torch.stack([packed % 16, packed // 16], dim=-1).flatten(1)
    values = _decoded(codes) * _spread(scales.float() * (1 / whole), weight.shape[1])
    return {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": whole}, values


def int4(weight: Tensor, group: int = 32) -> tuple[dict[str, Tensor], Tensor]:
    scales = (_largest(weight, group) / 7).to(torch.bfloat16)
    spread = _spread(scales.float(), weight.shape[1])
    values = (weight / spread).round().clamp(-8, 7) + 0.0  # no negative zeros
    packed, shape = _in_int32(values.long() + 8), torch.tensor(weight.shape)
    return {".weight_packed": packed, ".weight_scale": scales, ".weight_shape": shape}, values * spread


def _in_int32(numbers: Tensor) -> Tensor:
    """int32 [rows, columns / 8] of numbers from 0 to 15, lowest bits first."""
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for column in range(8):
        packed += numbers[:, column::8] << (4 * column)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _symmetric(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 to 15 [k, n], scales [k/128, n] of fp16, and what they mean: 8 is zero."""
    scales = (_largest(weight, 128) / 7).to(torch.float16)
    spread = _spread(scales.float(), weight.shape[1])
    numbers = (weight / spread).round().clamp(-8, 7) + 0.0  # no negative zeros
    return (numbers.long() + 8).t(), scales.t(), numbers * spread


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AutoGPTQ's: eight rows of [k, n] in one, zero points less 1, and each column's group."""
    numbers, scales, values = _symmetric(weight)
    k, n = numbers.shape
    zeros, groups = torch.full((k // 128, n), 7), torch.tensor([column // 128 for column in range(k)])
    return {
        ".qweight": _in_int32(numbers.t()).t(), ".qzeros": _in_int32(zeros), ".scales": scales,
        ".g_idx": groups.to(torch.int32),
    }, values  # fmt: skip


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AutoAWQ's: eight columns of [k, n] in one, the even ones first."""
    numbers, scales, values = _symmetric(weight)
    k, n = numbers.shape
    order = [8 * of + column for of in range(n // 8) for column in (0, 2, 4, 6, 1, 3, 5, 7)]
    zeros = torch.full((k // 128, n), 8)
    return {
        ".qweight": _in_int32(numbers[:, order]), ".qzeros": _in_int32(zeros), ".scales": scales
    }, values  # fmt: skip


_LLM_COMPRESSOR = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def _group(num_bits: int, kind: str, **settings: object) -> dict[str, object]:
    weights = {"num_bits": num_bits, "type": kind, "symmetric": True, **settings}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


ENCODERS: dict[str, tuple[Encoder, str, dict[str, object]]] = {
    "fp8 by block": (
        fp8_by_block, "FP8, a scale per 128x128",
        _LLM_COMPRESSOR | _group(8, "float", strategy="block", block_structure=[128, 128]),
    ),
    "fp8 by row": (
        fp8_by_row, "FP8, a scale per row", _LLM_COMPRESSOR | _group(8, "float", strategy="channel")
    ),
    "fp8 by tensor": (
        fp8_by_tensor, "FP8, a scale per tensor", {"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "mxfp8": (
        mxfp8, "MXFP8",
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
         "quantized_layers": {"a": {"quant_algo": "MXFP8"}, "b": {"quant_algo": "NVFP4"}}},
    ),
    "mxfp4": (mxfp4, "MXFP4", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4": (nvfp4, "NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4, packed": (
        nvfp4_packed, "NVFP4", {"quant_method": "compressed-tensors"} | _group(4, "float", group_size=16)
    ),
    "int4": (int4, "int4", {"quant_method": "compressed-tensors"} | _group(4, "int", group_size=32)),
}  # fmt: skip
"""The encoder, what `expertd layers` calls it, and what config.json says of it."""
