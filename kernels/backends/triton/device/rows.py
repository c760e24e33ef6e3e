"""Device code: rows sorted by group, quantized on the way, and added up again for each token."""

import triton
import triton.language as tl

from expertd.kernels.backends.triton.device.numbers import encode, largest, scale_of


@triton.jit
def permutation(
    ids, inverse, offsets, groups, seen, num_pairs, num_groups, num_ids, LOOKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write offsets int32 [num_groups + 1], and inverse int32 [num_pairs]: the row of each pair, -1: none.

    One program for each group, which finds its pairs among all ids, and one for those of no group. LOOKS_UP:
    ids are not groups, but have them in groups int32 [num_ids], and are written to seen; see `GroupTable`.
    """
    group = tl.program_id(0)
    of_pair = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        id = tl.load(ids + first + of_pair, mask=of_pair < num_pairs - first, other=-1)
        if LOOKS_UP:
            id = tl.load(groups + id, mask=(id >= 0) & (id < num_ids), other=-1)
        before += ((id >= 0) & (id < group)).to(tl.int32)
    row = tl.sum(before, 0)
    tl.store(offsets + group, row)
    for first in range(0, num_pairs, BLOCK):
        is_pair = of_pair < num_pairs - first
        id = tl.load(ids + first + of_pair, mask=is_pair, other=0)
        if LOOKS_UP:
            known = is_pair & (id >= 0) & (id < num_ids)
            found = tl.load(groups + id, mask=known, other=-1)
            if group == num_groups:
                tl.store(seen + 1 + first + of_pair, id, mask=is_pair)
                tl.store(seen + tl.zeros_like(id), 1, mask=known & (found < 0))
            id = found
        if group == num_groups:
            tl.store(inverse + first + of_pair, -1, mask=is_pair & ((id < 0) | (id >= num_groups)))
        else:
            is_here = (is_pair & (id == group)).to(tl.int32)
            tl.store(inverse + first + of_pair, row - 1 + tl.cumsum(is_here, 0), mask=is_here != 0)
            row += tl.sum(is_here, 0)


@triton.jit
def permute(
    tokens, token_scales, inverse, data, scales,
    top_k, k, num_rows, token_stride, scale_row_stride, scale_column_stride,
    QUANTIZED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write codes [num_rows, k] and scales [ceil(k / 128), num_rows] of tokens [T, k] at inverse [T, top_k].

    QUANTIZED: the tokens are codes with token_scales; else they are quantized as by `quantize_rows`. A
    program has BLOCKS blocks of 128 columns of a token.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    is_column, is_block = column < k, block * 128 < k
    values = tl.load(tokens + token * token_stride + column, mask=is_column, other=0)
    if QUANTIZED:
        places = token_scales + token * scale_row_stride + block.to(tl.int64) * scale_column_stride
        codes, of_block = values, tl.load(places, mask=is_block, other=0.0)
    else:
        values = values.to(tl.float32)
        of_block = scale_of(largest(values, 1))
        codes = encode(tl.div_rn(values, tl.broadcast_to(of_block[:, None], values.shape)))
    for slot in range(top_k):
        row = tl.load(inverse + token * top_k + slot).to(tl.int64)
        if row >= 0:
            tl.store(data + row * k + column, codes, mask=is_column)
            tl.store(scales + block.to(tl.int64) * num_rows + row, of_block, mask=is_block)


@triton.jit
def combine(rows, inverse, weights, out, top_k, n, BLOCK: tl.constexpr):
    """Write out [T, n]: the sum of rows bf16 [R, n] at inverse int32 [T, top_k] times weights fp32, in order.

    Where inverse is -1, nothing is added, whatever the weight is.
    """
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(top_k):
        row = tl.load(inverse + token * top_k + slot).to(tl.int64)
        weight = tl.where(row >= 0, tl.load(weights + token * top_k + slot), 0.0)
        values = tl.load(rows + row * n + column, mask=column < tl.where(row >= 0, n, 0), other=0.0)
        total = tl.fma(values.to(tl.float32), tl.broadcast_to(weight, total.shape), total)
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), mask=column < n)
