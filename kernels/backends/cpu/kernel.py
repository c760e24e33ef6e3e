"""The grouped GEMM of a CPU, written for the instructions that it has; FP8 weights are decoded in its caches.

Work is cut into items: 32 columns (rows of a group's weights [N, K]) times all rows of a piece of that group.
Threads take items in turn, each one ahead, so that weights are read in time. An item transposes and decodes
its weights 128 of K at a time, multiplies all rows by them, and adds the products to sums in fp32.

| instructions | weights become | products |
|---|---|---|
| AMX | bf16, exact | of tiles of 16 x 32 and 32 x 16, in fp32 |
| AVX512-BF16 | bf16, exact | of pairs, in fp32 |
| others | fp32, exact | multiply-add |

A row has the same bits whatever rows are beside it.
"""

from functools import partial
from typing import NamedTuple

from llvmlite import ir

from expertd.kernels.backends.cpu.code import (
    BF16,
    F32,
    I8,
    I16,
    I32,
    I64,
    VOID,
    Code,
    Value,
    const,
    filled,
    vector,
)
from expertd.kernels.backends.cpu.decode import (
    BF16_NAN,
    BLOCK,
    DECODED_BYTES,
    PLACES_BYTES,
    REST_BYTES,
    STEP_BYTES,
    Weights,
    decode_block,
    place_columns,
)
from expertd.kernels.backends.cpu.instructions import COLUMNS, Instructions

MAX_ROWS = 512
"""Rows of a piece, at most."""
PADDING_ROWS = 31
"""Rows that may be read behind the last one of a launch."""
PIECE = ("weights", "scales", "bias", "first_row", "num_rows")
"""Numbers of 64 bits of a piece: three addresses (bias 0: none), and rows of the launch."""
JOB = ("rows", "row_bytes", "out", "out_bytes", "columns", "k", "pieces", "num_pieces", "next", "scratch")
"""Numbers of 64 bits of a launch; k: a multiple of 16; next: the address of a counter that is 0 before it."""

_TILE = 16  # rows, columns
_TILE_DEPTH = 32  # of K
_TILE_BYTES = 64  # of a row of a tile
_SUM_BYTES = 4 * COLUMNS  # of a row
_PRODUCT_BYTES = 2 * _TILE * _SUM_BYTES
_PARTS = (DECODED_BYTES, REST_BYTES, PLACES_BYTES, _PRODUCT_BYTES)  # of a thread's scratch, then the sums
SCRATCH_BYTES = sum(_PARTS) + (MAX_ROWS + PADDING_ROWS + 1) * _SUM_BYTES
"""Bytes of each thread's scratch, which begins at a multiple of 64 bytes."""


class _Item(NamedTuple):
    """What an item is made of; addresses, and numbers of 64 bits."""

    rows: Value
    row_bytes: Value
    num_rows: Value
    weights: Weights
    scales: Value
    bias: Value
    out: Value
    out_bytes: Value
    columns: Value  # that there are, which may be more than COLUMNS
    products: Value
    sums: Value


def module_for(has: Instructions) -> ir.Module:
    """A module with `multiply`, which every thread of a launch calls with the address of its JOB."""
    module = ir.Module("expertd")
    code = Code(module, "multiply")
    build = code.build
    job = {name: code.load(I64, code.argument, 8 * number, 8) for number, name in enumerate(JOB)}
    thread = build.zext(code.call("omp_get_thread_num", I32), I64)
    scratch = code.at(code.pointer(job["scratch"]), code.times(thread, SCRATCH_BYTES))
    if has.has_tiles:
        _configure_tiles(code, scratch)
    items_of_piece = build.sdiv(code.plus(job["columns"], COLUMNS - 1), const(COLUMNS))
    num_items = build.mul(items_of_piece, job["num_pieces"])

    def take() -> Value:
        return build.atomic_rmw("add", code.pointer(job["next"]), const(1), "monotonic")

    def piece_and_column(number: Value) -> tuple[dict[str, Value], Value]:
        piece = code.at(
            code.pointer(job["pieces"]), code.times(build.sdiv(number, items_of_piece), 8 * len(PIECE))
        )
        of = {name: code.load(I64, piece, 8 * place, 8) for place, name in enumerate(PIECE)}
        return of, code.times(build.srem(number, items_of_piece), COLUMNS)

    def compute(number: Value) -> Value:
        following = take()
        is_last = build.icmp_signed(">=", following, num_items)
        after, column_after = piece_and_column(build.select(is_last, number, following))
        of, column = piece_and_column(number)
        weights, weights_after = (
            code.plus(each["weights"], build.mul(at, job["k"]))
            for each, at in ((of, column), (after, column_after))
        )
        blocks = build.sdiv(code.plus(job["k"], BLOCK - 1), const(BLOCK))
        bias = code.plus(of["bias"], code.times(column, 2))
        out = code.at(code.pointer(job["out"]), build.mul(of["first_row"], job["out_bytes"]))
        item = _Item(
            rows=code.at(code.pointer(job["rows"]), build.mul(of["first_row"], job["row_bytes"])),
            row_bytes=job["row_bytes"],
            num_rows=of["num_rows"],
            weights=Weights(
                first=code.pointer(weights),
                to_next=build.sub(weights_after, weights),
                k=job["k"],
                blocks=blocks,
                columns=build.sub(job["columns"], column),
                decoded=scratch,
                rest=code.at(scratch, sum(_PARTS[:1])),
                places=code.at(scratch, sum(_PARTS[:2])),
            ),
            scales=code.at(
                code.pointer(of["scales"]),
                code.times(build.mul(build.sdiv(column, const(BLOCK)), blocks), 4),
            ),
            bias=build.select(build.icmp_signed("==", of["bias"], const(0)), const(0), bias),
            out=code.at(out, code.times(column, 2)),
            out_bytes=job["out_bytes"],
            columns=build.sub(job["columns"], column),
            products=code.at(scratch, sum(_PARTS[:3])),
            sums=code.at(scratch, sum(_PARTS)),
        )
        place_columns(code, item.weights)
        _begin_sums(code, item)
        _add_products(code, has, item)
        _write_sums(code, item)
        return following

    code.while_below(num_items, take(), compute)
    if has.has_tiles:
        code.call("llvm.x86.tilerelease", VOID)
    build.ret_void()
    return module


def _begin_sums(code: Code, item: _Item) -> None:
    """Each row begins with the bias."""
    build, sums = code.build, vector(F32, COLUMNS)
    with build.if_else(build.icmp_signed("!=", item.bias, const(0))) as (biased, plain):
        with biased:
            bias = code.load(vector(I16, COLUMNS), code.pointer(item.bias))
            code.store(_widened(code, build.zext(bias, vector(I32, COLUMNS))), item.products, align=64)
        with plain:
            code.store(filled(sums, 0), item.products, align=64)
    first = code.load(sums, item.products, align=64)
    code.loop(
        0, item.num_rows, 1, lambda row: code.store(first, item.sums, code.times(row, _SUM_BYTES), align=64)
    )


def _add_products(code: Code, has: Instructions, item: _Item) -> None:
    """All of K, a block at a time: decoded numbers are exact, and their scale comes after the sum."""
    build = code.build

    def add(block: Value) -> None:
        decode_block(code, has, item.weights, block)
        scale = code.load(F32, item.scales, code.times(block, 4), 4)
        rows = code.at(item.rows, code.times(block, 4 * BLOCK // has.pair))
        if has.has_tiles:
            pairs = build.and_(code.plus(item.num_rows, _TILE - 1), const(-2 * _TILE))
            code.loop(0, pairs, 2 * _TILE, lambda row: _add_by_tiles(code, item, row, 2, rows, scale))
            code.loop(pairs, item.num_rows, _TILE, lambda row: _add_by_tiles(code, item, row, 1, rows, scale))
            return
        begin: Value = const(0)
        for height in has.heights:
            stop = code.plus(item.num_rows, 1 - height)
            add_rows = partial(_add_by_vectors, code, has, item, height=height, rows=rows, scale=scale)
            (begin,) = code.loop(begin, stop, height, add_rows)

    code.loop(0, item.weights.blocks, 1, add)


def _add_by_vectors(
    code: Code, has: Instructions, item: _Item, row: Value, height: int, rows: Value, scale: Value
) -> None:
    """`height` rows by the decoded block, with a number or a pair of K in each step."""
    sums = vector(F32, has.lanes)
    places = [code.at(rows, code.build.mul(code.plus(row, each), item.row_bytes)) for each in range(height)]

    def step(number: Value, *products: Value) -> list[Value]:
        at, align = code.times(number, STEP_BYTES), 4 * has.lanes
        weights = [
            code.load(sums, item.weights.decoded, code.plus(at, align * each), align)
            for each in range(has.vectors)
        ]
        spread = [code.spread(code.load(F32, place, code.times(number, 4), 4), has.lanes) for place in places]
        return [
            _multiply_add(code, has, product, spread[each // has.vectors], weights[each % has.vectors])
            for each, product in enumerate(products)
        ]

    zeros = [filled(sums, 0)] * (height * has.vectors)
    _, *products = code.loop(0, BLOCK // has.pair, 1, step, *zeros)
    factor = code.spread(scale, has.lanes)
    for each, product in enumerate(products):
        of_row = code.at(item.sums, code.times(code.plus(row, each // has.vectors), _SUM_BYTES))
        _add_scaled(code, code.at(of_row, 4 * has.lanes * (each % has.vectors)), product, factor)


def _add_by_tiles(code: Code, item: _Item, row: Value, height: int, rows: Value, scale: Value) -> None:
    """`height` tiles of rows by two of columns.

    Products are in tiles 0 to 3, rows in 4 and 5, weights in 6 and 7.
    """
    at, next_row = code.at(rows, code.build.mul(row, item.row_bytes)), code.times(item.row_bytes, _TILE)
    places = [at, code.at(at, next_row)][:height]
    for product in range(2 * height):
        code.call("llvm.x86.tilezero", VOID, _tile(product))
    for k in range(0, BLOCK, _TILE_DEPTH):
        for column in range(2):
            weights = code.at(item.weights.decoded, k // 2 * STEP_BYTES + column * _TILE_BYTES)
            code.call("llvm.x86.tileloadd64", VOID, _tile(6 + column), weights, const(STEP_BYTES))
        for each, place in enumerate(places):
            code.call("llvm.x86.tileloadd64", VOID, _tile(4 + each), code.at(place, 2 * k), item.row_bytes)
            for column in range(2):
                tiles = _tile(2 * each + column), _tile(4 + each), _tile(6 + column)
                code.call("llvm.x86.tdpbf16ps", VOID, *tiles)
    for product in range(2 * height):
        of_tile = code.at(item.products, product // 2 * _TILE * _SUM_BYTES + product % 2 * _TILE_BYTES)
        code.call("llvm.x86.tilestored64", VOID, _tile(product), of_tile, const(_SUM_BYTES))
    factor, sums = code.spread(scale, COLUMNS), code.at(item.sums, code.times(row, _SUM_BYTES))

    def add_row(number: Value) -> None:
        at = code.times(number, _SUM_BYTES)
        product = code.load(vector(F32, COLUMNS), item.products, at, align=64)
        _add_scaled(code, code.at(sums, at), product, factor)

    code.loop(0, height * _TILE, 1, add_row)


def _write_sums(code: Code, item: _Item) -> None:
    """Rounded to bf16."""
    build = code.build

    def rounded(row: Value) -> Value:
        return _rounded(
            code, code.load(vector(F32, COLUMNS), item.sums, code.times(row, _SUM_BYTES), align=64)
        )

    def write(row: Value) -> None:
        code.store(rounded(row), item.out, build.mul(row, item.out_bytes), align=2)

    def write_some(row: Value) -> None:
        code.store(rounded(row), item.products, align=64)
        to = code.at(item.out, build.mul(row, item.out_bytes))

        def copy(column: Value) -> None:
            at = code.times(column, 2)
            code.store(code.load(I16, item.products, at, 2), to, at, 2)

        code.loop(0, item.columns, 1, copy)

    with build.if_else(build.icmp_signed(">=", item.columns, const(COLUMNS))) as (all_columns, some):
        with all_columns:
            code.loop(0, item.num_rows, 1, write)
        with some:
            code.loop(0, item.num_rows, 1, write_some)


def _widened(code: Code, numbers: Value) -> Value:
    """bf16, in the low half of i32, as fp32."""
    shifted = code.build.shl(numbers, filled(numbers.type, 16))
    return code.build.bitcast(shifted, vector(F32, numbers.type.count))


def _rounded(code: Code, numbers: Value) -> Value:
    """fp32 as the bits of bf16, to the nearest even; NaN, whatever its bits, stays NaN."""
    build, wide = code.build, vector(I32, numbers.type.count)
    bits = build.bitcast(numbers, wide)
    last = build.and_(build.lshr(bits, filled(wide, 16)), filled(wide, 1))
    bits = build.lshr(build.add(bits, build.add(last, filled(wide, 0x7FFF))), filled(wide, 16))
    is_nan = build.fcmp_unordered("uno", numbers, numbers)
    return build.trunc(build.select(is_nan, filled(wide, BF16_NAN), bits), vector(I16, wide.count))


def _multiply_add(code: Code, has: Instructions, product: Value, rows: Value, weights: Value) -> Value:
    """Vectors of fp32, or of pairs of bf16 with fp32 sums."""
    if not has.has_bf16:
        return code.call(f"llvm.fma.v{has.lanes}f32", product.type, rows, weights, product)
    pairs = vector(BF16, 2 * has.lanes)
    rows, weights = (code.build.bitcast(each, pairs) for each in (rows, weights))
    return code.call("llvm.x86.avx512bf16.dpbf16ps.512", product.type, product, rows, weights)


def _add_scaled(code: Code, sums: Value, product: Value, factor: Value) -> None:
    """To sums that lie there."""
    lanes = product.type.count
    total = code.call(
        f"llvm.fma.v{lanes}f32", product.type, product, factor, code.load(product.type, sums, align=4)
    )
    code.store(total, sums, align=4)


def _configure_tiles(code: Code, scratch: Value) -> None:
    """Eight tiles of 16 rows of 64 bytes."""
    shapes = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[_TILE] * 8, *[0] * 8]
    code.store(ir.Constant(vector(I8, 64), shapes), scratch, align=64)
    code.call("llvm.x86.ldtilecfg", VOID, scratch)


def _tile(number: int) -> Value:
    return ir.Constant(I8, number)
