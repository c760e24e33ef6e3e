"""What reads FP8 weights [N, K] and writes them as numbers of bf16 or fp32, with all columns side by side."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from expertd.kernels.backends.cpu.code import F32, I8, I32, I64, Code, Value, const, filled, vector
from expertd.kernels.backends.cpu.instructions import COLUMNS, Instructions

BLOCK = 128
"""Elements of K, and columns, that share one scale."""
STEP_BYTES = 4 * COLUMNS
"""Bytes of decoded weights for one or two elements of K."""
DECODED_BYTES, REST_BYTES, PLACES_BYTES = BLOCK * STEP_BYTES, BLOCK * COLUMNS, 8 * COLUMNS
"""Bytes of `Weights.decoded`, `rest` and `places`."""
BF16_NAN = 0x7FC0
_SQUARE = 16  # columns, and words of K, that are transposed at a time
_WORD = 4  # numbers of K
_COPIED = 16  # bytes: K is a multiple
_SIGN, _MAGNITUDE, _NAN = 0x80, 0x7F, 0x7F  # of e4m3
_FIRST_NORMAL = 8  # magnitudes below are multiples of 2^-9


class Weights(NamedTuple):
    """The weights of COLUMNS; addresses, and numbers of 64 bits."""

    first: Value  # column's
    to_next: Value  # bytes from there to what the thread reads next
    k: Value
    blocks: Value  # of K, the last of which may be shorter
    columns: Value  # that there are, which may be more than COLUMNS
    decoded: Value  # where a block goes: steps of one or two numbers of K, each of all columns
    rest: Value  # where a shorter block is copied, with zeros behind
    places: Value  # where the columns' addresses are


def place_columns(code: Code, weights: Weights) -> None:
    """Where the weights of each column are; for columns that there are not, those of the last one."""
    build = code.build

    def place(column: Value) -> None:
        last = code.plus(weights.columns, -1)
        there = build.select(build.icmp_signed("<", column, last), column, last)
        at = build.ptrtoint(code.at(weights.first, build.mul(there, weights.k)), I64)
        code.store(at, weights.places, code.times(column, 8), align=8)

    code.loop(0, COLUMNS, 1, place)


def decode_block(code: Code, has: Instructions, weights: Weights, block: Value) -> None:
    """BLOCK of K: steps of `pair` numbers of K, each of all COLUMNS."""
    build, first, bytes_at_once = code.build, code.times(block, BLOCK), _SQUARE * _WORD
    steps = _WORD // has.pair
    is_last = build.icmp_signed("==", code.plus(block, 1), weights.blocks)
    to_next = build.select(is_last, build.sub(weights.to_next, first), const(BLOCK))
    is_short = build.icmp_signed(">", code.plus(first, BLOCK), weights.k)
    with build.if_then(is_short, likely=False):
        _copy_rest(code, weights, first)

    def decode(number: Value) -> None:
        at = code.plus(first, code.times(number, bytes_at_once))
        for column in range(0, COLUMNS, _SQUARE):
            rows = []
            for each in range(column, column + _SQUARE):
                place = code.pointer(code.load(I64, weights.places, 8 * each, 8))
                rows.append(code.load(vector(I32, _SQUARE), place, at))
                code.prefetch(place, build.add(at, to_next))
            for word, numbers in enumerate(_transposed(code, rows)):
                for step in range(steps):
                    to = code.plus(
                        code.times(number, bytes_at_once // has.pair * STEP_BYTES),
                        (word * steps + step) * STEP_BYTES + 4 * column,
                    )
                    code.store(_decoded(code, has, numbers, step), weights.decoded, to, align=64)

    code.loop(0, BLOCK // bytes_at_once, 1, decode)


def _copy_rest(code: Code, weights: Weights, first: Value) -> None:
    """K from `first` on, to where zeros are behind it, and where the columns' weights are from then on."""
    build, some = code.build, vector(I8, _COPIED)

    def copy(column: Value) -> None:
        place = code.pointer(code.load(I64, weights.places, code.times(column, 8), 8))
        rest = code.at(weights.rest, code.times(column, BLOCK))

        def write(at: Value) -> None:
            code.store(code.load(some, place, code.plus(first, at)), rest, at)

        (end,) = code.loop(0, build.sub(weights.k, first), _COPIED, write)
        code.loop(end, BLOCK, _COPIED, lambda at: code.store(filled(some, 0), rest, at))
        begin = build.sub(build.ptrtoint(rest, I64), first)
        code.store(begin, weights.places, code.times(column, 8), align=8)

    code.loop(0, COLUMNS, 1, copy)


def _transposed(code: Code, rows: Sequence[Value]) -> list[Value]:
    """16 vectors of 16 numbers of 32 bits, by shuffles that are an instruction each."""

    def interleaved(one: int, other: int, size: int, half: int, of: Sequence[Value]) -> Value:
        """Of each four numbers of both, the first or second half; `size` of one, then of the other."""
        begins = [four + begin for four in range(0, 16, 4) for begin in range(2 * half, 2 * half + 2, size)]
        some = (*range(size), *range(16, 16 + size))
        numbers = [begin + each for begin in begins for each in some]
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
        (joined(fours[each], fours[each + 4], odd), joined(fours[each + 8], fours[each + 12], odd))
        for odd in (0, 1) for each in range(4)
    ]  # fmt: skip
    return [joined(first, second, odd) for odd in (0, 1) for first, second in eights]


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
    nan = filled(wide, BF16_NAN << bits - 16)
    value = build.select(is_nan, nan, build.select(is_subnormal, subnormal, normal))
    sign = build.shl(build.and_(code_of, filled(wide, _SIGN)), filled(wide, bits - 8))
    return build.or_(value, sign)


def _bf16_bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0]) >> 16
