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

import struct
from collections.abc import Sequence
from dataclasses import dataclass
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

COLUMNS = 32
"""Of an item."""
BLOCK = 128
"""Of K, and of columns, that have one scale."""
MAX_ROWS = 512
"""Of a piece."""
PADDING_ROWS = 31
"""That may be read behind the last row of a launch."""
PIECE = ("weights", "scales", "bias", "first_row", "num_rows")
"""Numbers of 64 bits of a piece: three addresses (bias 0: none), and rows of the launch."""
JOB = ("rows", "row_bytes", "out", "out_bytes", "columns", "k", "pieces", "num_pieces", "next", "scratch")
"""Numbers of 64 bits of a launch; k: a multiple of 16; next: the address of a counter that is 0 before it."""

_TILE = 16  # rows, columns
_TILE_DEPTH = 32  # of K
_TILE_BYTES = 64  # of a row of a tile
_SQUARE = 16  # columns, and words of 4 of K, that are transposed at a time
_WORD = 4  # of K
_COPIED = 16  # bytes: K is a multiple
_STEP_BYTES = 4 * COLUMNS  # of decoded weights: of one or two numbers of K
_SUM_BYTES = 4 * COLUMNS  # of a row
_DECODED_BYTES = BLOCK * _STEP_BYTES
_PRODUCT_BYTES = 2 * _TILE * _SUM_BYTES
_REST_BYTES = COLUMNS * BLOCK  # of K that is no multiple of BLOCK
_PLACES_BYTES = COLUMNS * 8
_PARTS = (_DECODED_BYTES, _PRODUCT_BYTES, _REST_BYTES, _PLACES_BYTES)  # of a thread's scratch, then the sums
SCRATCH_BYTES = sum(_PARTS) + (MAX_ROWS + PADDING_ROWS + 1) * _SUM_BYTES
"""Of each thread, at a multiple of 64 bytes."""
_SIGN, _MAGNITUDE, _NAN = 0x80, 0x7F, 0x7F  # of e4m3
_FIRST_NORMAL = 8  # magnitudes below are multiples of 2^-9
_BF16_NAN = 0x7FC0


@dataclass(frozen=True)
class Instructions:
    """What a CPU has.

    lanes      fp32 numbers of a vector
    registers  vectors
    has_bf16   AVX512-BF16
    has_tiles  AMX for bf16, and AVX512-BF16
    """

    lanes: int
    registers: int
    has_bf16: bool = False
    has_tiles: bool = False

    @property
    def pair(self) -> int:
        """Numbers of K that lie beside each other in a vector of weights."""
        return 2 if self.has_bf16 else 1

    @property
    def steps(self) -> int:
        """Of a word of K."""
        return _WORD // self.pair

    @property
    def vectors(self) -> int:
        """Of decoded weights in a step."""
        return COLUMNS // self.lanes

    @property
    def heights(self) -> Sequence[int]:
        """Rows multiplied at once: as many as there are registers for, then fewer, for the rest."""
        most = (self.registers - 4) // self.vectors
        return [most, *(height for height in (8, 4, 2, 1) if height < most)]


class _Item(NamedTuple):
    """What an item is made of; addresses, and numbers of 64 bits."""

    rows: Value
    row_bytes: Value
    num_rows: Value
    weights: Value
    to_next: Value  # from there to the weights of the thread's next item
    k: Value
    scales: Value
    blocks: Value  # of K, the last of which may be shorter
    bias: Value
    out: Value
    out_bytes: Value
    columns: Value  # that there are, at most COLUMNS
    decoded: Value
    products: Value
    rest: Value  # of the last block, if that is shorter, with zeros behind
    places: Value  # of the columns' weights
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
            weights=code.pointer(weights),
            to_next=build.sub(weights_after, weights),
            k=job["k"],
            scales=code.at(
                code.pointer(of["scales"]),
                code.times(build.mul(build.sdiv(column, const(BLOCK)), blocks), 4),
            ),
            blocks=blocks,
            bias=build.select(build.icmp_signed("==", of["bias"], const(0)), const(0), bias),
            out=code.at(out, code.times(column, 2)),
            out_bytes=job["out_bytes"],
            columns=build.sub(job["columns"], column),
            decoded=scratch,
            products=code.at(scratch, sum(_PARTS[:1])),
            rest=code.at(scratch, sum(_PARTS[:2])),
            places=code.at(scratch, sum(_PARTS[:3])),
            sums=code.at(scratch, sum(_PARTS)),
        )
        _place_columns(code, item)
        _begin_sums(code, item)
        _add_products(code, has, item)
        _write_sums(code, item)
        return following

    code.while_below(num_items, take(), compute)
    if has.has_tiles:
        code.call("llvm.x86.tilerelease", VOID)
    build.ret_void()
    return module


def _place_columns(code: Code, item: _Item) -> None:
    """Where the weights of each column are; for columns that there are not, those of the last one."""
    build = code.build

    def place(column: Value) -> None:
        last = code.plus(item.columns, -1)
        there = build.select(build.icmp_signed("<", column, last), column, last)
        at = build.ptrtoint(code.at(item.weights, build.mul(there, item.k)), I64)
        code.store(at, item.places, code.times(column, 8), align=8)

    code.loop(0, COLUMNS, 1, place)


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
        _decode_block(code, has, item, block)
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

    code.loop(0, item.blocks, 1, add)


def _add_by_vectors(
    code: Code, has: Instructions, item: _Item, row: Value, height: int, rows: Value, scale: Value
) -> None:
    """`height` rows by the decoded block, with a number or a pair of K in each step."""
    sums = vector(F32, has.lanes)
    places = [code.at(rows, code.build.mul(code.plus(row, each), item.row_bytes)) for each in range(height)]

    def step(number: Value, *products: Value) -> list[Value]:
        at, align = code.times(number, _STEP_BYTES), 4 * has.lanes
        weights = [
            code.load(sums, item.decoded, code.plus(at, align * each), align) for each in range(has.vectors)
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
            weights = code.at(item.decoded, k // 2 * _STEP_BYTES + column * _TILE_BYTES)
            code.call("llvm.x86.tileloadd64", VOID, _tile(6 + column), weights, const(_STEP_BYTES))
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


def _decode_block(code: Code, has: Instructions, item: _Item, block: Value) -> None:
    """BLOCK of K: steps of `pair` numbers of K, each of all COLUMNS."""
    build, first, bytes_at_once = code.build, code.times(block, BLOCK), _SQUARE * _WORD
    is_last = build.icmp_signed("==", code.plus(block, 1), item.blocks)
    to_next = build.select(is_last, build.sub(item.to_next, first), const(BLOCK))
    is_short = build.icmp_signed(">", code.plus(first, BLOCK), item.k)
    with build.if_then(is_short, likely=False):
        _copy_rest(code, item, first)

    def decode(number: Value) -> None:
        at = code.plus(first, code.times(number, bytes_at_once))
        for column in range(0, COLUMNS, _SQUARE):
            rows = []
            for each in range(column, column + _SQUARE):
                place = code.pointer(code.load(I64, item.places, 8 * each, 8))
                rows.append(code.load(vector(I32, _SQUARE), place, at))
                code.prefetch(place, build.add(at, to_next))
            for word, numbers in enumerate(_transposed(code, rows)):
                for step in range(has.steps):
                    to = code.plus(
                        code.times(number, bytes_at_once // has.pair * _STEP_BYTES),
                        (word * has.steps + step) * _STEP_BYTES + 4 * column,
                    )
                    code.store(_decoded(code, has, numbers, step), item.decoded, to, align=64)

    code.loop(0, BLOCK // bytes_at_once, 1, decode)


def _copy_rest(code: Code, item: _Item, first: Value) -> None:
    """K from `first` on, to where zeros are behind it, and where the columns' weights are from then on."""
    build, some = code.build, vector(I8, _COPIED)

    def copy(column: Value) -> None:
        place = code.pointer(code.load(I64, item.places, code.times(column, 8), 8))
        rest = code.at(item.rest, code.times(column, BLOCK))

        def write(at: Value) -> None:
            code.store(code.load(some, place, code.plus(first, at)), rest, at)

        (end,) = code.loop(0, build.sub(item.k, first), _COPIED, write)
        code.loop(end, BLOCK, _COPIED, lambda at: code.store(filled(some, 0), rest, at))
        begin = build.sub(build.ptrtoint(rest, I64), first)
        code.store(begin, item.places, code.times(column, 8), align=8)

    code.loop(0, COLUMNS, 1, copy)


def _transposed(code: Code, rows: Sequence[Value]) -> list[Value]:
    """16 vectors of 16 numbers of 32 bits, by shuffles that are an instruction each."""

    def interleaved(one: int, other: int, size: int, half: int, of: Sequence[Value]) -> Value:
        """Of each four numbers of both, the first or second half; `size` of one, then of the other."""
        begins = [four + begin for four in range(0, 16, 4) for begin in range(2 * half, 2 * half + 2, size)]
        numbers = [
            begin + each for begin in begins for vector in (0, 16) for each in range(vector, vector + size)
        ]
        return code.shuffle(of[one], of[other], numbers)

    def joined(one: Value, other: Value, odd: int) -> Value:
        """The even or the odd ones of the fours of both."""
        return code.shuffle(one, other, [four + each for four in range(4 * odd, 32, 8) for each in range(4)])

    pairs = [interleaved(at, at + 1, 1, half, rows) for at in range(0, 16, 2) for half in (0, 1)]
    fours = [
        interleaved(at + each, at + each + 2, 2, half, pairs)
        for at in range(0, 16, 4) for each in (0, 1) for half in (0, 1)
    ]  # fmt: skip
    eights = [
        [joined(fours[at + each], fours[at + each + 4], odd) for at in (0, 8)]
        for odd in (0, 1) for each in range(4)
    ]  # fmt: skip
    return [joined(*halves, odd) for odd in (0, 1) for halves in eights]


def _decoded(code: Code, has: Instructions, words: Value, step: int) -> Value:
    """A step of words of e4m3, as the bits of bf16 or fp32, exactly, subnormals and NaN too."""
    build = code.build
    bits = 16 if has.has_bf16 else 32
    shift, exponent = (7 - 3, 7) if has.has_bf16 else (23 - 3, 23)
    wide = vector(ir.IntType(bits), words.type.count * has.pair)
    if has.has_bf16:
        octets = vector(I8, 4 * words.type.count)
        numbers = [_WORD * (each // 2) + 2 * step + each % 2 for each in range(wide.count)]
        with_zeros = [place for number in numbers for place in (number, octets.count)]
        code_of = build.bitcast(
            code.shuffle(build.bitcast(words, octets), filled(octets, 0), with_zeros), wide
        )
    else:
        code_of = build.and_(build.lshr(words, filled(wide, 8 * step)), filled(wide, 0xFF))
    magnitude = build.and_(code_of, filled(wide, _MAGNITUDE))
    normal = build.add(build.shl(magnitude, filled(wide, shift)), filled(wide, 120 << exponent))
    if has.has_bf16:
        table = ir.Constant(
            wide, [_bf16_bits(index * 2**-9) if index < 8 else 0 for index in range(wide.count)]
        )
        subnormal = code.call("llvm.x86.avx512.permvar.hi.512", wide, table, magnitude)
    else:
        floats = vector(F32, wide.count)
        small = build.fmul(build.uitofp(magnitude, floats), filled(floats, 2**-9))
        subnormal = build.bitcast(small, wide)
    is_subnormal = build.icmp_unsigned("<", magnitude, filled(wide, _FIRST_NORMAL))
    is_nan = build.icmp_unsigned("==", magnitude, filled(wide, _NAN))
    nan = filled(wide, _BF16_NAN << bits - 16)
    value = build.select(is_nan, nan, build.select(is_subnormal, subnormal, normal))
    sign = build.shl(build.and_(code_of, filled(wide, _SIGN)), filled(wide, bits - 8))
    return build.or_(value, sign)


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
    return build.trunc(build.select(is_nan, filled(wide, _BF16_NAN), bits), vector(I16, wide.count))


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


def _bf16_bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0]) >> 16
