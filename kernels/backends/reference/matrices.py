"""The reference backend's weights: a bf16 matrix per group, in the layout that multiplies fastest."""

import functools
import platform

import torch
from torch import Tensor

from expertd.kernels.ops.four_bits import Weights, columns_of, decode, groups_of

Matrices = tuple[Tensor, ...]  # [N, K] of each group, packed or plain

_PACKED_ROWS = 64  # the height that oneDNN packs for; all others from 1 to 512 rows are as fast
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
# From this height on, heights are padded to multiples of it: oneDNN compiles a kernel for each new height, in
# 0.5 to 6 ms, and all heights within 16 rows run equally fast.
HEIGHT_STEP = 16
# Where oneDNN cannot multiply bf16, torch's GEMM takes up to 8 times as long as one in fp32, in which bf16's
# products are exact. From this height on, it pays to expand the matrix to fp32; padded heights are all above.
_FP32_ROWS = HEIGHT_STEP
_FP32_ELEMENTS = 1 << 19  # of a matrix, expanded at once: 2 MB, for the caches


@functools.cache
def can_pack() -> bool:
    """Whether oneDNN can multiply bf16 here by a weight packed in its own blocked layout."""
    return (
        _IS_X86
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows bf16 [M, K] times a matrix [N, K] of `WeightCache`, transposed, plus bf16 [N]: bf16 [M, N]."""
    if matrix.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, matrix, bias, "none", [], "")
        return out
    if _IS_X86 and rows.is_cpu and len(rows) >= _FP32_ROWS:
        return _multiply_in_fp32(rows, matrix, bias)
    return torch.nn.functional.linear(rows, matrix, bias)


def _multiply_in_fp32(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    n, k = matrix.shape
    out = rows.new_empty(len(rows), n)
    wide, step = rows.float(), max(64, _FP32_ELEMENTS // k)
    for start in range(0, n, step):
        part = slice(start, start + step)
        added = None if bias is None else bias[part].float()
        out[:, part] = torch.nn.functional.linear(wide, matrix[part].float(), added)
    return out


def matrices_of(weights: Weights) -> Matrices:
    """The matrix of each group of weights [G, N, K]."""
    # Group by group, so that there is never a whole bf16 copy beside the packed one, and in one buffer:
    # among matrices that stay, freed ones would leave holes in the heap, up to half of it.
    buffer: Tensor | None = None
    if weights.data.is_cpu and can_pack():
        size = weights.data.shape[1], columns_of(weights)
        buffer = torch.empty(size, dtype=torch.bfloat16, device=weights.data.device)
    return tuple(_prepared(group, buffer) for group in groups_of(weights))


def prepared_matrix(group: Weights) -> Tensor:
    """The matrix of one group [N, K], in the layout that multiplies fastest."""
    return _prepared(group, None)


def _prepared(group: Weights, buffer: Tensor | None) -> Tensor:
    matrix = decode(group, torch.bfloat16, buffer)
    if matrix.device.type == "cpu" and can_pack():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, _PACKED_ROWS)
        return packed
    return matrix
