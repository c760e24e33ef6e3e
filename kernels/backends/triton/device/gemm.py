"""Device code: the grouped GEMM of FP8 rows and weights, and the same with a gated activation behind it.

WEIGHTS says what weights are: FP8 with a scale per 128x128 block, or four bits (four_bits.py).

A group's rows are cut into tiles of BLOCK_M, and each program makes the work list, all tiles of rows times
all of columns, from the groups' extents. Every variant adds up a row's products in the same order: 128 of K
in the tensor cores, then these sums, scaled, in fp32. So a row's bits depend on it and on the weights alone.
"""

import triton
import triton.language as tl

from expertd.kernels.backends.triton.device.four_bits import (
    FP8_WEIGHTS,
    NVFP4,
    PAIRS,
    PARTS_OF_BLOCK,
    add_part,
    decode_rows,
    load_scales,
    scale_at,
    scale_of_part,
    scales_of_row,
)
from expertd.kernels.backends.triton.device.numbers import decode, encode, largest, scale_of

GROUPS = tl.constexpr(1024)  # at most
BLOCK_K = tl.constexpr(128)
BAND = tl.constexpr(8)  # tiles of rows that take turns at a tile of weights while the L2 cache has it
DECODED = tl.constexpr(65536.0)  # the product of what two results of `decode` lack


@triton.jit
def tiles_to_end(extents, num_groups, MASKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """int32 [GROUPS]: tiles of rows of the groups up to and with each; extents: offsets, or MASKED counts."""
    group = tl.arange(0, GROUPS)
    is_group = group < num_groups
    if MASKED:
        rows = tl.load(extents + group, mask=is_group, other=0)
    else:
        rows = tl.load(extents + group + 1, mask=is_group, other=0)
        rows -= tl.load(extents + group, mask=is_group, other=0)
    return tl.cumsum((rows + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def find_tile(tile, ends, columns, extents, stride, MASKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, the group's first row of a, the tile's first row in it, rows, tile of columns) of a tile.

    columns: tiles of columns; stride: rows of a from one group to the next, if MASKED.
    """
    is_before = ends * columns <= tile
    group = tl.sum(is_before.to(tl.int32), 0)
    if MASKED:
        start = group.to(tl.int64) * stride
        rows = tl.load(extents + group)
    else:
        start = tl.load(extents + group).to(tl.int64)
        rows = tl.load(extents + group + 1) - start.to(tl.int32)
    within = tile - tl.max(tl.where(is_before, ends, 0), 0) * columns
    first = within // (BAND * columns) * BAND
    height = tl.minimum((rows + BLOCK_M - 1) // BLOCK_M - first, BAND)
    within -= first * columns
    first = (first + within % height) * BLOCK_M
    return group.to(tl.int64), start, first, tl.minimum(rows - first, BLOCK_M), within // height


@triton.jit
def first_scale(a_scales, group, start, first, group_stride, row_stride, MASKED: tl.constexpr):
    """Where the scales of a tile's first row are."""
    if MASKED:
        return a_scales + group * group_stride + first * row_stride
    return a_scales + (start + first) * row_stride


@triton.jit
def add_product(total, rows, weights, row_scales, scale, SWAP: tl.constexpr, FP8: tl.constexpr):
    """total plus rows [BLOCK_M, BLOCK_K] times weights [BLOCK_N, BLOCK_K] transposed, scaled.

    SWAP: transposed as a whole, as the larger side of the tensor cores on Hopper needs 64 rows.
    """
    if not FP8:
        rows, weights, scale = decode(rows), decode(weights), scale * DECODED
    scales = row_scales * scale
    if SWAP:
        products, scales = tl.dot(weights, tl.trans(rows)), scales[None, :]
    else:
        products, scales = tl.dot(rows, tl.trans(weights)), scales[:, None]
    return tl.fma(products, tl.broadcast_to(scales, products.shape), total)


@triton.jit
def multiply(
    a, a_scales, b, b_scales, b_whole, extents, out, bias,
    num_groups, n, k, stride, scale_group_stride, scale_row_stride, scale_column_stride,
    scales_of_block, scale_dtype, has_bias,
    WEIGHTS: tl.constexpr, MASKED: tl.constexpr, SWAP: tl.constexpr, FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write out bf16 [rows, n]: a [rows, k] times b [num_groups, n, k], plus bias bf16 [num_groups, n].

    Of four bits: a is words of two columns, k counts these, as bytes of b; a row of it has scales_of_block (1
    or 4) scales for a block, INT4's of scale_dtype, and NVFP4's a factor b_whole fp32 [num_groups, n].
    """
    columns, blocks = tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K)
    ends = tiles_to_end(extents, num_groups, MASKED, BLOCK_M)
    for tile in range(tl.program_id(0), tl.max(ends, 0) * columns, tl.num_programs(0)):
        group, start, first, height, column = find_tile(tile, ends, columns, extents, stride, MASKED, BLOCK_M)
        of_row, of_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        of_column = column * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.where(of_row < height, of_row, 0)
        weight = tl.minimum(of_column, n - 1) - column * BLOCK_N
        a_tile, b_tile = a + (start + first) * k, b + (group * n + column * BLOCK_N) * k
        a_scale = first_scale(a_scales, group, start, first, scale_group_stride, scale_row_stride, MASKED)
        total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        if WEIGHTS == FP8_WEIGHTS:
            a_places, b_places = row[:, None] * k + of_k[None, :], weight[:, None] * k + of_k[None, :]
            b_scale = b_scales + (group * tl.cdiv(n, 128) + column * BLOCK_N // 128) * blocks
            for block in tl.range(0, blocks, num_stages=STAGES):
                is_k = (of_k < k - block * BLOCK_K)[None, :]
                rows = tl.load(a_tile + block * BLOCK_K + a_places, mask=is_k, other=0.0)
                weights = tl.load(b_tile + block * BLOCK_K + b_places, mask=is_k, other=0.0)
                row_scales = tl.load(a_scale + block * scale_column_stride + row * scale_row_stride)
                total = add_product(total, rows, weights, row_scales, tl.load(b_scale + block), SWAP, FP8)
        else:
            of_pair = tl.arange(0, PAIRS)
            a_places, b_places = row[:, None] * k + of_pair[None, :], weight[:, None] * k + of_pair[None, :]
            num_scales = scales_of_row(k, scales_of_block)
            b_scale = scale_at(b_scales, (group * n + column * BLOCK_N) * num_scales, scale_dtype, WEIGHTS)
            for part in tl.range(0, k // PAIRS, num_stages=STAGES):
                even, odd = decode_rows(tl.load(a_tile + part * PAIRS + a_places))
                data = tl.load(b_tile + part * PAIRS + b_places)
                row_scale = a_scale + part // PARTS_OF_BLOCK * scale_column_stride
                row_scales = tl.load(row_scale + row * scale_row_stride)
                scale = weight * num_scales + scale_of_part(part, scales_of_block)
                scales = load_scales(b_scale, scale, scale_dtype, WEIGHTS)
                total = add_part(total, even, odd, data, row_scales, scales, SWAP, WEIGHTS)
            if WEIGHTS == NVFP4:
                whole = tl.load(b_whole + group * n + column * BLOCK_N + weight)
                total *= whole[:, None] if SWAP else whole[None, :]
        if SWAP:
            total = tl.trans(total)
        is_column = of_column < n
        added = tl.load(bias + group * n + of_column, mask=of_column < n * has_bias, other=0.0)
        total += added.to(tl.float32)[None, :]
        places = out + (start + first) * n + of_row[:, None].to(tl.int64) * n + of_column[None, :]
        tl.store(places, total.to(tl.bfloat16), mask=(of_row < height)[:, None] & is_column[None, :])


@triton.jit
def activate(gate, up, alpha, limit, up_offset, clamp_after):
    """The gated activation in fp32; see `expertd.activation`. NaN stays NaN."""
    gate = tl.where((gate > limit) & (clamp_after == 0), limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + up_offset
    gate = gate / (1.0 + tl.exp(-alpha * gate))
    return tl.where((gate > limit) & (clamp_after != 0), limit, gate) * up


@triton.jit
def multiply_gated(
    a, a_scales, b, b_scales, b_whole, offsets, out, out_scales, bias,
    num_groups, num_rows, n, k, scale_row_stride, scale_column_stride,
    scales_of_block, scale_dtype, has_bias, alpha, limit, up_offset, clamp_after,
    WEIGHTS: tl.constexpr, SWAP: tl.constexpr, FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write out, codes [num_rows, n] with scales [n / 128, num_rows], of a [num_rows, k], activated.

    b [num_groups, 2n, k] and bias bf16 [num_groups, 2n] have the gates' columns first. BLOCK_N is 128. Four
    bits are as in `multiply`.
    """
    columns, blocks = n // BLOCK_N, tl.cdiv(k, BLOCK_K)
    ends = tiles_to_end(offsets, num_groups, False, BLOCK_M)
    for tile in range(tl.program_id(0), tl.max(ends, 0) * columns, tl.num_programs(0)):
        group, start, first, height, column = find_tile(tile, ends, columns, offsets, 0, False, BLOCK_M)
        of_row, of_k, of_column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
        row = tl.where(of_row < height, of_row, 0)
        a_tile, a_scale = a + (start + first) * k, a_scales + (start + first) * scale_row_stride
        gate_tile = b + (group * 2 * n + column * BLOCK_N) * k
        up_tile = gate_tile + n.to(tl.int64) * k
        gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        up = gate
        if WEIGHTS == FP8_WEIGHTS:
            a_places, b_places = row[:, None] * k + of_k[None, :], of_column[:, None] * k + of_k[None, :]
            gate_scale = b_scales + (group * 2 * columns + column) * blocks
            up_scale = gate_scale + columns.to(tl.int64) * blocks
            for block in tl.range(0, blocks, num_stages=STAGES):
                is_k = (of_k < k - block * BLOCK_K)[None, :]
                rows = tl.load(a_tile + block * BLOCK_K + a_places, mask=is_k, other=0.0)
                row_scales = tl.load(a_scale + block * scale_column_stride + row * scale_row_stride)
                weights = tl.load(gate_tile + block * BLOCK_K + b_places, mask=is_k, other=0.0)
                gate = add_product(gate, rows, weights, row_scales, tl.load(gate_scale + block), SWAP, FP8)
                weights = tl.load(up_tile + block * BLOCK_K + b_places, mask=is_k, other=0.0)
                up = add_product(up, rows, weights, row_scales, tl.load(up_scale + block), SWAP, FP8)
        else:
            of_pair = tl.arange(0, PAIRS)
            a_places = row[:, None] * k + of_pair[None, :]
            b_places = of_column[:, None] * k + of_pair[None, :]
            num_scales = scales_of_row(k, scales_of_block)
            gate_row = group * 2 * n + column * BLOCK_N
            gate_scale = scale_at(b_scales, gate_row * num_scales, scale_dtype, WEIGHTS)
            up_scale = scale_at(b_scales, (gate_row + n) * num_scales, scale_dtype, WEIGHTS)
            for part in tl.range(0, k // PAIRS, num_stages=STAGES):
                even, odd = decode_rows(tl.load(a_tile + part * PAIRS + a_places))
                row_scale = a_scale + part // PARTS_OF_BLOCK * scale_column_stride
                row_scales = tl.load(row_scale + row * scale_row_stride)
                scale = of_column * num_scales + scale_of_part(part, scales_of_block)
                data = tl.load(gate_tile + part * PAIRS + b_places)
                scales = load_scales(gate_scale, scale, scale_dtype, WEIGHTS)
                gate = add_part(gate, even, odd, data, row_scales, scales, SWAP, WEIGHTS)
                data = tl.load(up_tile + part * PAIRS + b_places)
                scales = load_scales(up_scale, scale, scale_dtype, WEIGHTS)
                up = add_part(up, even, odd, data, row_scales, scales, SWAP, WEIGHTS)
            if WEIGHTS == NVFP4:
                gate_whole = tl.load(b_whole + gate_row + of_column)
                up_whole = tl.load(b_whole + gate_row + n + of_column)
                gate *= gate_whole[:, None] if SWAP else gate_whole[None, :]
                up *= up_whole[:, None] if SWAP else up_whole[None, :]
        if SWAP:
            gate, up = tl.trans(gate), tl.trans(up)
        of_bias = bias + group * 2 * n + column * BLOCK_N + of_column
        gate += tl.load(of_bias, mask=of_column < has_bias * BLOCK_N, other=0.0).to(tl.float32)[None, :]
        up += tl.load(of_bias + n, mask=of_column < has_bias * BLOCK_N, other=0.0).to(tl.float32)[None, :]
        values = activate(gate, up, alpha, limit, up_offset, clamp_after)
        scales = scale_of(largest(values, 1))
        is_row = of_row < height
        tl.store(out_scales + column.to(tl.int64) * num_rows + start + first + of_row, scales, mask=is_row)
        codes = encode(tl.div_rn(values, tl.broadcast_to(scales[:, None], values.shape)))
        places = (
            (start + first) * n + of_row[:, None].to(tl.int64) * n + column * BLOCK_N + of_column[None, :]
        )
        tl.store(out + places, codes, mask=is_row[:, None])
