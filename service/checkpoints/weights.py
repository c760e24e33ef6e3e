"""Reads the weights of one MoE layer from a checkpoint's memory-mapped files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from torch import Tensor

from expertd.kernels import Quantized, quantize_blocks
from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints import CheckpointError, LayerSource, Matrix
from expertd.service.checkpoints.decode import decode, quantize_by_powers
from expertd.service.checkpoints.encodings import Encoding
from expertd.service.checkpoints.files import OpenFiles, Stored
from expertd.service.moe.weights import ExpertWeights

BytesRead = Callable[[int], None]
MOST_SCALE = 1e6
"""Far above any model's. With this one, products of 7168 and 2048 columns and tokens around 1 stay finite."""
MOST_ROUTER = 1e30
"""With larger numbers in a router, logits may not be finite."""


def read_layer(source: LayerSource, device: torch.device | str, progress: BytesRead) -> ExpertWeights:
    """The layer's weights on `device`, gate and up fused. FP8 is copied bit for bit, others are quantized.

    `progress` is called with the bytes of each matrix after it is read, and may raise to stop. Needs memory
    for the layer and one more matrix. Raises CheckpointError for weights or scales that are not finite, and
    if a file has changed since `source` was found.
    """
    gate, _, down = source.groups[0]
    h, i, num_groups = len(gate.columns), len(gate.rows), len(source.groups)
    gate_up_out, down_out = _empty(num_groups, 2 * i, h, device), _empty(num_groups, h, i, device)
    with OpenFiles("pt") as files, _file_changes_refused():
        router = _plain(files, source.router).to(device)
        bias, shared_gate = (
            None if tensor is None else _plain(files, tensor).flatten().to(device)
            for tensor in (source.router_bias, source.shared_gate)
        )
        for group, (gate, up, down) in enumerate(source.groups):
            for matrix, out in (
                (gate, _rows(gate_up_out, group, 0, i)),
                (up, _rows(gate_up_out, group, i, i)),
                (down, _rows(down_out, group, 0, h)),
            ):
                _read(files, matrix, out)
                progress(matrix.num_bytes)
    return ExpertWeights(router, gate_up_out, down_out, bias, shared_gate)


@contextmanager
def _file_changes_refused() -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint: expected unchanged files, got: {error}") from error


def _read(files: OpenFiles, matrix: Matrix, out: Quantized) -> None:
    encoded = matrix.encoded
    if not encoded.encoding.is_native:
        whole = decode(encoded, lambda tensor: files[tensor.file].get_tensor(tensor.name), out.data.device)
        quantize = quantize_by_powers if encoded.encoding.has_powers else quantize_blocks
        data, scales = quantize(whole[_slice(matrix.rows), _slice(matrix.columns)].contiguous())
    elif encoded.scales is None:
        data, scales = quantize_blocks(_part(files, encoded.weight, matrix).to(out.data.device))
    else:
        data = _part(files, encoded.weight, matrix)
        if encoded.encoding is Encoding.TENSOR:
            scales = files[encoded.scales.file].get_tensor(encoded.scales.name).reshape(1, 1)
        else:
            scales = _part(files, encoded.scales, matrix, SCALE_BLOCK)
    bits = out.data.view(torch.uint8)
    bits.copy_(data.view(torch.uint8))
    out.scales.copy_(scales.to(torch.float32))  # exact: fp32 can represent bf16 and e8m0 scales
    if not out.scales.isfinite().all() or ((bits & 0x7F) == 0x7F).any():  # e4m3 has NaN but no infinity
        raise _not_finite(encoded.weight)
    name = f"{encoded.weight.file}: {encoded.weight.name}"
    if (out.scales < 0).any():
        raise CheckpointError(f"{name}: expected scales of at least 0, got negative ones")
    if (largest := float(out.scales.max())) > MOST_SCALE:
        raise CheckpointError(f"{name}: expected scales up to {MOST_SCALE:g}, got {largest:g}")


def _part(files: OpenFiles, tensor: Stored, matrix: Matrix, unit: int = 1) -> Tensor:
    """The matrix's part of its weight, or of its scales, of which one stands for `unit` rows and columns."""
    at = _slice(matrix.rows, unit), _slice(matrix.columns, unit)
    stored = files[tensor.file].get_slice(tensor.name)
    at = at[::-1] if matrix.transposed else at
    part: Tensor = stored[at if matrix.expert is None else (matrix.expert, *at)]
    return part.t().contiguous() if matrix.transposed else part


def _plain(files: OpenFiles, tensor: Stored) -> Tensor:
    values: Tensor = files[tensor.file].get_tensor(tensor.name).to(torch.float32)
    if not values.isfinite().all():
        raise _not_finite(tensor)
    if (largest := float(values.abs().max())) > MOST_ROUTER:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name}: expected numbers up to {MOST_ROUTER:g}, got {largest:g}"
        )
    return values


def _not_finite(tensor: Stored) -> CheckpointError:
    return CheckpointError(f"{tensor.file}: {tensor.name}: expected finite numbers, got others")


def _empty(num_groups: int, n: int, k: int, device: torch.device | str) -> Quantized:
    data = torch.empty((num_groups, n, k), dtype=torch.float8_e4m3fn, device=device)
    return Quantized(data, torch.empty((num_groups, n // SCALE_BLOCK, k // SCALE_BLOCK), device=device))


def _rows(out: Quantized, group: int, first: int, count: int) -> Quantized:
    blocks = slice(first // SCALE_BLOCK, (first + count) // SCALE_BLOCK)
    return Quantized(out.data[group, first : first + count], out.scales[group, blocks])


def _slice(part: range, unit: int = 1) -> slice:
    return slice(part.start // unit, part.stop // unit)
