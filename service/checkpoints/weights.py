"""Reads the weights of one MoE layer from a checkpoint's files."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from expertd.kernels import ExpertBiases, ExpertPart, FourBits, Quantized, Weights, quantize_blocks
from expertd.kernels.ops.four_bits import mapped
from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.encodings import Encoded, Scales
from expertd.service.checkpoints.files import OpenFiles, Stored
from expertd.service.checkpoints.model import Biases, LayerSource, Matrix
from expertd.service.device import device_of
from expertd.service.moe.needs import GROUPS_AT_ONCE
from expertd.service.moe.tensor_file import TensorFileError
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.moe.weights import ExpertWeights, empty_matrices
from expertd.weight_format import WeightFormat, WeightLayout

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}


class PartReader:
    """Reads from open files to `device`. Its methods raise CheckpointError if a file has changed."""

    def __init__(self, files: OpenFiles, reader: TensorReader, device: torch.device) -> None:
        self._files = files
        self._reader = reader
        self.device = device
        self._last: dict[Stored, tuple[int, Tensor]] = {}

    def whole(self, stored: Stored) -> Tensor:
        """A tensor."""
        out = self._empty(stored, stored.shape)
        self._read(stored, out, 0)
        return out

    def of_expert(self, stored: Stored, expert: int | None) -> Tensor:
        """What a tensor of all experts has of one, kept until another is read; None: a tensor of one."""
        if expert is None:
            return self.whole(stored)
        last = self._last.get(stored)
        if last is None or last[0] != expert:
            out = self._empty(stored, stored.shape[1:])
            self._read(stored, out, expert * out.nbytes)
            last = self._last[stored] = expert, out
        return last[1]

    def loader(self, matrix: Matrix) -> Callable[[Stored], Tensor]:
        """What reads of a tensor of the matrix's weight, or of all experts', what its expert has."""
        layout = matrix.encoded.layout
        return lambda stored: self.of_expert(stored, matrix.expert if layout.is_of_all(stored) else None)

    def part(self, matrix: Matrix) -> Tensor:
        """As `read_part`, to a new tensor."""
        out = self._empty(matrix.encoded.weight, (len(matrix.rows), len(matrix.columns)))
        self.read_part(matrix, out)
        return out

    def read_part(self, matrix: Matrix, out: Tensor) -> None:
        """Fill `out` with the matrix's values, as they are in the file."""
        stored, transposed = matrix.encoded.weight, matrix.encoded.layout.transposed
        rows, columns = (matrix.columns, matrix.rows) if transposed else (matrix.rows, matrix.columns)
        width = stored.shape[-1]
        if rows.step == 1 and len(columns) == width:
            directly = out.is_contiguous() and not transposed
            block = out if directly else self._empty(stored, (len(rows), width))
            row = (matrix.expert or 0) * stored.shape[-2] + rows.start
            self._read(stored, block, row * width * out.itemsize)
        else:
            block = self._around(stored, matrix.expert)[_slice(rows), _slice(columns)]
        if block is not out:
            out.copy_(block.t() if transposed else block)

    def _around(self, stored: Stored, expert: int | None) -> Tensor:
        """A matrix of which others need the other columns or rows: it is read once for all of them."""
        if expert is not None:
            return self.of_expert(stored, expert)
        out = self._empty(stored, stored.shape)
        self._read(stored, out, 0)
        return out

    def _read(self, stored: Stored, out: Tensor, start: int) -> None:
        file = self._files[stored.file]
        tensor = file.tensors.get(stored.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (stored.dtype, stored.shape):
            expected = f"{stored.dtype} of shape {stored.shape}, as when it was found"
            got = "none" if tensor is None else f"{tensor.dtype} of shape {tensor.shape}"
            raise CheckpointError(f"{stored.file}: {stored.name}: expected {expected}, got {got}")
        try:
            self._reader.read(file, tensor, out, start)
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error

    def _empty(self, stored: Stored, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=_DTYPES[stored.dtype], device=self.device)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)


_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LoadTensor = Callable[[Stored], Tensor]
"""What a tensor has of the matrix's expert."""


def decode(matrix: Matrix, load: LoadTensor) -> Tensor:
    """The matrix in float32 [n, k]."""
    encoded, rows, columns = matrix.encoded, _slice(matrix.rows), _slice(matrix.columns)
    values = load(encoded.weight)
    _check_symmetric(encoded, load)
    values = values.flatten(1) if values.ndim == 3 else values
    values = values.t() if encoded.layout.transposed else values
    if values.shape[0] == encoded.shape[0]:
        values = _numbers(values[rows])[:, columns]
    else:  # numbers share bytes along n
        values = _numbers(values.t(), encoded.is_awq).t()[rows, columns]
    return (values * scales_at(matrix, load, matrix.rows, matrix.columns)).contiguous()


def scales_at(matrix: Matrix, load: LoadTensor, rows: range, columns: range) -> Tensor:
    """What multiplies the weight's values at these rows and columns, in float32; [1, 1] if it is all one."""
    encoded = matrix.encoded
    assert encoded.scales is not None
    scales = _spread(encoded.scales, matrix, load, rows, columns)
    return scales if encoded.whole is None else scales * _spread(encoded.whole, matrix, load, rows, columns)


def quantize_by_powers(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_blocks`, with scales that are powers of two: numbers that have such scales stay exact.

    All of them do unless some in a block are so much smaller than its largest that FP8 underflows.
    """
    size = matrix.shape
    matrix = torch.nn.functional.pad(matrix, (0, -size[1] % SCALE_BLOCK, 0, -size[0] % SCALE_BLOCK))
    n, k = matrix.shape
    blocks = matrix.view(n // SCALE_BLOCK, SCALE_BLOCK, k // SCALE_BLOCK, SCALE_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=torch.finfo(torch.float32).tiny)
    scales = torch.exp2((largest / torch.finfo(torch.float8_e4m3fn).max).log2().ceil())
    data = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return data.view(n, k)[: size[0], : size[1]], scales


def _numbers(values: Tensor, is_awq: bool = False) -> Tensor:
    """The numbers that elements hold, before scales; those of four bits come lowest bits first, but AWQ's."""
    if values.dtype == torch.int32:  # from -8 to 7, with 8 added
        return (_nibbles(values, is_awq) - 8).to(torch.float32)
    if values.dtype in (torch.uint8, torch.int8):
        codes = values.contiguous().view(torch.uint8)
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=values.device)
        return table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    return values.to(torch.float32)


def _nibbles(values: Tensor, is_awq: bool) -> Tensor:
    """int32 [.., 8 * k]: the eight parts of four bits of each int32 [.., k]."""
    shifts = torch.tensor(_AWQ_SHIFTS if is_awq else range(0, 32, 4), device=values.device)
    return (values[..., None] >> shifts & 15).flatten(-2)


def _check_symmetric(encoded: Encoded, load: LoadTensor) -> None:
    """Raise CheckpointError if GPTQ's or AWQ's numbers have another zero than 8, or groups out of order."""
    if encoded.zeros is not None:
        zero = 8 if encoded.is_awq else 7  # GPTQ's files have 1 less
        others = _nibbles(load(encoded.zeros), is_awq=False) != zero
        if others.any():
            expected = f"symmetric numbers, whose zero points are all {zero}"
            raise CheckpointError(
                f"{encoded.zeros.file}: {encoded.zeros.name}: expected {expected}, got others"
            )
    if encoded.order is not None and encoded.scales is not None:
        order = load(encoded.order)
        if not torch.equal(order, torch.arange(len(order), device=order.device) // encoded.scales.unit[1]):
            expected = "groups of columns in order (desc_act: false)"
            raise CheckpointError(
                f"{encoded.order.file}: {encoded.order.name}: expected {expected}, got others"
            )


def _grid(scales: Scales, matrix: Matrix, load: LoadTensor) -> Tensor:
    """The scales of the whole weight, [rows of units, columns of units], as the file has them."""
    values = load(scales.stored)
    grid = [-(-size // unit) for size, unit in zip(matrix.encoded.shape, scales.unit, strict=True)]
    if matrix.encoded.layout.transposed:
        values = values.reshape(grid[::-1]).t()
    return values.reshape(grid)


def _spread(scales: Scales, matrix: Matrix, load: LoadTensor, rows: range, columns: range) -> Tensor:
    """The scale of each of these rows and columns of the weight."""
    values = _grid(scales, matrix, load)
    if values.dtype == torch.uint8:  # an exponent
        values = values.view(torch.float8_e8m0fnu)
    values = values.to(torch.float32)
    values = 1 / values if scales.divides else values
    for dim, (part, unit) in enumerate(zip((rows, columns), scales.unit, strict=True)):
        if values.shape[dim] > 1:
            at = torch.arange(part.start, part.stop, part.step, device=values.device) // unit
            values = values.index_select(dim, at)
    return values


_ONE_OF_MXFP4 = 127
BytesRead = Callable[[int], None]
MAX_SCALE = 1e6
"""Far above any model's. With this one, products of 7168 and 2048 columns and tokens around 1 stay finite."""
MAX_ROUTER = 1e30
"""With larger numbers in a router, logits may not be finite."""


def read_layer(source: LayerSource, device: torch.device | str, progress: BytesRead) -> ExpertWeights:
    """The layer's weights on `device`, gate and up fused, in the layouts of `source`.

    FP8 and four bits are copied bit for bit, others are quantized. Where sizes are no multiples of 128, rows
    of gates and ups, and columns of down, are filled with zeros.
    `progress` is called with the bytes of each group after it is read, and may raise to stop. Needs memory
    for the layer, for `GROUPS_AT_ONCE` matrices as they are in the files, and for one in float32. Raises
    CheckpointError for weights or scales that are not finite, and if a file has changed since `source` was
    found.
    """
    first_gate, num_groups = source.groups[0][0], len(source.groups)
    h = len(first_gate.columns)
    i = -(-len(first_gate.rows) // SCALE_BLOCK) * SCALE_BLOCK
    splits = source.num_shared > 0 and source.shared_layout != source.weight_layout
    num_routed = num_groups - source.num_shared if splits else num_groups

    def room(layout: WeightLayout, count: int) -> ExpertPart:
        return ExpertPart(
            empty_matrices(layout, count, 2 * i, h, device), empty_matrices(layout, count, h, i, device)
        )

    routed = room(source.weight_layout, num_routed)
    shared = room(source.shared_layout, source.num_shared) if splits else None
    device = routed.down.data.device  # with its number, since other threads may have another GPU
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
                if shared is not None and group >= num_routed:
                    at, out = group - num_routed, shared
                else:
                    at, out = group, routed
                _read(reader, gate, _rows(out.gate_up, at, 0, i), decoding)
                _read(reader, up, _rows(out.gate_up, at, i, i), decoding)
                _read(reader, down, _rows(out.down, at, 0, h), decoding)
                return sum(matrix.num_bytes for matrix in (gate, up, down))

        with ThreadPoolExecutor(GROUPS_AT_ONCE, "expertd-groups") as pool:
            try:
                for num_bytes in pool.map(read_group, range(num_groups)):
                    progress(num_bytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        biases = None if source.biases is None else _biases(reader, source.biases, i)
    return ExpertWeights(router, *routed.matrices, bias, shared_gate, biases, shared)


def _read(reader: PartReader, matrix: Matrix, out: Weights, decoding: threading.Lock) -> None:
    if isinstance(out, FourBits):
        _read_four_bits(reader, matrix, out)
    else:
        _read_fp8(reader, matrix, out, decoding)


def _read_four_bits(reader: PartReader, matrix: Matrix, out: FourBits) -> None:
    """Codes and scales as they are; what the matrix does not fill is zero."""
    encoded, load = matrix.encoded, reader.loader(matrix)
    assert encoded.scales is not None
    _check_symmetric(encoded, load)
    codes = load(encoded.weight)
    if encoded.is_awq:
        numbers = _nibbles(codes, is_awq=True).t()
        codes = (numbers[:, 0::2] | numbers[:, 1::2] << 4).to(torch.uint8)
    else:
        codes = codes.flatten(1) if codes.ndim == 3 else codes
        codes = (codes.t() if encoded.layout.transposed else codes).contiguous().view(torch.uint8)
    n, k = len(matrix.rows), len(matrix.columns)
    if out.data.shape != (n, k // 2):
        out.data.zero_()
        out.scales.fill_(_ONE_OF_MXFP4 if out.format is WeightFormat.MXFP4 else 1)
        if out.whole is not None:
            out.whole.fill_(1)
    codes = codes[_slice(matrix.rows), matrix.columns.start // 2 : matrix.columns.stop // 2]
    # compressed-tensors adds 8 to a number of int4; as two's complement, that is another highest bit.
    out.data[:n, : k // 2] = codes ^ 0x88 if out.format is WeightFormat.INT4 else codes
    size = encoded.scales.unit[1]
    groups = slice(matrix.columns.start // size, matrix.columns.stop // size)
    scales = _grid(encoded.scales, matrix, load)[_slice(matrix.rows), groups]
    _bits(out.scales[:n, : k // size]).copy_(_bits(scales))
    multiplied = out.scales.view(torch.float8_e8m0fnu) if out.scales.dtype == torch.uint8 else out.scales
    in_all = multiplied.to(torch.float32)
    if encoded.whole is not None and out.whole is not None:
        out.whole[:n] = _spread(encoded.whole, matrix, load, matrix.rows, range(1))[:, 0]
        in_all = in_all * out.whole[:, None]
    _check_scales(encoded.scales.stored, in_all)


def _bits(tensor: Tensor) -> Tensor:
    """The same tensor for copies: of dtypes that torch copies elsewhere, or slowly, the bytes."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _read_fp8(reader: PartReader, matrix: Matrix, out: Quantized, decoding: threading.Lock) -> None:
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
    _check_scales(source, out.scales)


def _check_scales(source: Stored, scales: Tensor) -> None:
    if not scales.isfinite().all():
        raise _not_finite(source)
    name = f"{source.file}: {source.name}"
    if (scales < 0).any():
        raise CheckpointError(f"{name}: expected scales of at least 0, got negative ones")
    if (largest := float(scales.max())) > MAX_SCALE:
        raise CheckpointError(f"{name}: expected scales up to {MAX_SCALE:g}, got {largest:g}")


def _quantized(
    reader: PartReader, matrix: Matrix, size: torch.Size, decoding: threading.Lock
) -> tuple[Tensor, Tensor]:
    """Data, with zeros up to `size`, and scales of a matrix whose bits do not stay."""
    encoded, load = matrix.encoded, reader.loader(matrix)
    is_float = encoded.scales is None
    scales = (scales.stored for scales in (encoded.scales, encoded.whole) if scales)
    found = encoded.weight, *scales, *filter(None, (encoded.zeros, encoded.order))
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
    if (largest := float(values.abs().max())) > MAX_ROUTER:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name}: expected numbers up to {MAX_ROUTER:g}, got {largest:g}"
        )
    return values


def _not_finite(tensor: Stored) -> CheckpointError:
    return CheckpointError(f"{tensor.file}: {tensor.name}: expected finite numbers, got others")


def _rows(out: Weights, group: int, first: int, count: int) -> Weights:
    if isinstance(out, FourBits):
        return mapped(out, lambda tensor: tensor[group, first : first + count])
    blocks = slice(first // SCALE_BLOCK, -(-(first + count) // SCALE_BLOCK))
    return Quantized(out.data[group, first : first + count], out.scales[group, blocks])
