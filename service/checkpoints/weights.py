"""Reads the weights of one MoE layer from a checkpoint's files."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from expertd.kernels import ExpertBiases, Quantized, quantize_blocks
from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints import CheckpointError, LayerSource, Matrix
from expertd.service.checkpoints.decode import decode, quantize_by_powers, scales_at
from expertd.service.checkpoints.files import OpenFiles, Stored
from expertd.service.checkpoints.layer import Biases
from expertd.service.checkpoints.parts import PartReader
from expertd.service.device import device_of
from expertd.service.moe.needs import GROUPS_AT_ONCE
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.moe.weights import ExpertWeights

BytesRead = Callable[[int], None]
MOST_SCALE = 1e6
"""Far above any model's. With this one, products of 7168 and 2048 columns and tokens around 1 stay finite."""
MOST_ROUTER = 1e30
"""With larger numbers in a router, logits may not be finite."""


def read_layer(source: LayerSource, device: torch.device | str, progress: BytesRead) -> ExpertWeights:
    """The layer's weights on `device`, gate and up fused. FP8 is copied bit for bit, others are quantized.

    Where sizes are no multiples of 128, rows of gates and ups, and columns of down, are filled with zeros.
    `progress` is called with the bytes of each group after it is read, and may raise to stop. Needs memory
    for the layer, for `GROUPS_AT_ONCE` matrices as they are in the files, and for one in float32. Raises
    CheckpointError for weights or scales that are not finite, and if a file has changed since `source` was
    found.
    """
    first_gate, num_groups = source.groups[0][0], len(source.groups)
    h = len(first_gate.columns)
    i = -(-len(first_gate.rows) // SCALE_BLOCK) * SCALE_BLOCK
    gate_up_out, down_out = _empty(num_groups, 2 * i, h, device), _empty(num_groups, h, i, device)
    device = down_out.data.device  # with its number, since other threads may have another GPU
    own = device_of(device)
    stream = own.current_stream()
    decoding = threading.Lock()
    with OpenFiles() as files, TensorReader() as tensors:
        reader = PartReader(files, tensors, device)
        router = _plain(reader, source.router)
        bias, shared_gate = (
            None if tensor is None else _plain(reader, tensor).flatten()
            for tensor in (source.router_bias, source.shared_gate)
        )

        def read_group(group: int) -> int:
            with own.on(stream):
                reader = PartReader(files, tensors, device)
                gate, up, down = source.groups[group]
                _read(reader, gate, _rows(gate_up_out, group, 0, i), decoding)
                _read(reader, up, _rows(gate_up_out, group, i, i), decoding)
                _read(reader, down, _rows(down_out, group, 0, h), decoding)
                return sum(matrix.num_bytes for matrix in (gate, up, down))

        with ThreadPoolExecutor(GROUPS_AT_ONCE, "expertd-groups") as pool:
            try:
                for num_bytes in pool.map(read_group, range(num_groups)):
                    progress(num_bytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        biases = None if source.biases is None else _biases(reader, source.biases, i)
    return ExpertWeights(router, gate_up_out, down_out, bias, shared_gate, biases)


def _read(reader: PartReader, matrix: Matrix, out: Quantized, decoding: threading.Lock) -> None:
    encoded = matrix.encoded
    source = encoded.weight  # of the scales
    if encoded.scales is None or not matrix.is_native:
        data, scales = _quantized(reader, matrix, out.data.shape, decoding)
        out.data.view(torch.uint8).copy_(data.view(torch.uint8))
    else:
        source = encoded.scales.stored
        part = out.data[: len(matrix.rows), : len(matrix.columns)]
        if part.shape != out.data.shape:
            out.data.view(torch.uint8).zero_()
        reader.read_part(matrix, part)
        blocks = matrix.rows[::SCALE_BLOCK], matrix.columns[::SCALE_BLOCK]
        scales = scales_at(matrix, reader.loader(matrix), *blocks)
    bits = out.data.view(torch.uint8)
    out.scales.copy_(scales.to(torch.float32))  # exact: fp32 can represent bf16 and e8m0 scales
    # e4m3 has no infinity, and two NaNs: the largest byte and the largest signed one. Reductions are fast.
    has_nan = bool(bits.amax() == 0xFF) or bool(bits.view(torch.int8).amax() == 0x7F)
    if has_nan:
        raise _not_finite(encoded.weight)
    if not out.scales.isfinite().all():
        raise _not_finite(source)
    name = f"{source.file}: {source.name}"
    if (out.scales < 0).any():
        raise CheckpointError(f"{name}: expected scales of at least 0, got negative ones")
    if (largest := float(out.scales.max())) > MOST_SCALE:
        raise CheckpointError(f"{name}: expected scales up to {MOST_SCALE:g}, got {largest:g}")


def _quantized(
    reader: PartReader, matrix: Matrix, size: torch.Size, decoding: threading.Lock
) -> tuple[Tensor, Tensor]:
    """Data, with zeros up to `size`, and scales of a matrix whose bits do not stay."""
    encoded, load = matrix.encoded, reader.loader(matrix)
    is_float = encoded.scales is None
    found = encoded.weight, *(scales.stored for scales in (encoded.scales, encoded.whole) if scales)
    tensors = {} if is_float else {stored: load(stored) for stored in found}
    values = reader.part(matrix) if is_float else None
    with decoding:  # one at a time, for it needs several times the memory
        values = decode(matrix, tensors.__getitem__) if values is None else values
        n, k = values.shape
        padded = torch.nn.functional.pad(values, (0, size[1] - k, 0, size[0] - n))
        return quantize_by_powers(padded) if encoded.encoding.has_powers else quantize_blocks(padded)


def _biases(reader: PartReader, biases: Biases, intermediate: int) -> ExpertBiases:
    """The held experts' biases, gates first, each filled with zeros to `intermediate`."""
    held = torch.tensor(biases.experts, device=reader.device)
    gate_up, down = (_plain(reader, tensor)[held] for tensor in (biases.gate_up, biases.down))
    size = gate_up.shape[1] // 2
    gates_first = gate_up.view(-1, size, 2).mT if biases.interleaved else gate_up.view(-1, 2, size)
    filled = torch.nn.functional.pad(gates_first, (0, intermediate - size)).flatten(1)
    return ExpertBiases(filled.to(torch.bfloat16).contiguous(), down.to(torch.bfloat16).contiguous())


def _plain(reader: PartReader, tensor: Stored) -> Tensor:
    values = reader.whole(tensor).to(torch.float32)
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
    blocks = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    return Quantized(data, torch.empty((num_groups, *blocks), dtype=torch.float32, device=device))


def _rows(out: Quantized, group: int, first: int, count: int) -> Quantized:
    blocks = slice(first // SCALE_BLOCK, -(-(first + count) // SCALE_BLOCK))
    return Quantized(out.data[group, first : first + count], out.scales[group, blocks])
