"""What a warp of csrc/consumer_codes.cuh has in registers, computed word by word as csrc/codes.cuh does."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from expertd.kernels.backends.hopper.tiles import FOUR_BITS
from expertd.weight_format import WeightFormat

_WORD = 0xFFFFFFFF
Fragments = Sequence[tuple[int, int, int, int]]
"""Of each wgmma of a K block, in order: the four registers of A."""


def prmt(low: int, high: int, selector: int) -> int:
    """PTX's prmt.b32 without a mode: a selector's highest bit asks for the sign of the byte in all bits."""
    source = (low | high << 32).to_bytes(8, "little")
    chosen = 0
    for i in range(4):
        byte = source[selector >> 4 * i & 7]
        if selector >> 4 * i & 8:
            byte = 0xFF * (byte >> 7)
        chosen |= byte << 8 * i
    return chosen


def decode_e2m1(word: int, exponent: int) -> tuple[int, int]:
    """codes::decode_e2m1."""
    low = (exponent * 0x01010100 + 0x14100800) & _WORD
    high = (exponent * 0x01010101 + 0x24201C18) & _WORD
    magnitudes = word & 0x77777777
    first = prmt(low, high, magnitudes) | (word & 0x80808080)
    return first, prmt(low, high, magnitudes >> 16) | (word << 4 & 0x80808080)


def decode_int4(word: int) -> tuple[int, int]:
    """codes::decode_int4."""

    def four(lower: int, signs: int) -> int:
        negative = prmt(0xCACCCED0, 0xB8C0C4C8, lower)
        others = prmt(0x44403800, 0x4E4C4A48, lower)
        return (negative & signs) | (others & ~signs & _WORD)

    lower = word & 0x77777777
    masks = [prmt(signs, signs, 0xBA98) for signs in (word, word << 4 & _WORD)]
    return four(lower, masks[0]), four(lower >> 16, masks[1])


def words_of(codes: Sequence[int]) -> int:
    """The packed word of eight codes, by the comment at the top of codes.cuh."""
    word = 0
    for i, code in enumerate(codes):
        word |= (code & 7) << 4 * i | (code >> 3) << (8 * i + 7 if i < 4 else 8 * (i - 4) + 3)
    return word


def fragments(block: bytes, weights: WeightFormat, group: int, warp: int, lane: int) -> Fragments:
    """codes::decode, and which registers each wgmma gets: all of 32 columns, or zeros for half of them."""
    row_bytes = FOUR_BITS[weights, group].plain[0].block_bytes // 128 - 64
    exponents = block[8192 + warp * 16 * row_bytes + lane // 4 * 2 * row_bytes :]
    found = []
    for half in range(2):
        start = warp * 1024 + half * 512 + lane * 16
        quads = [[0, 0, 0, 0], [0, 0, 0, 0]]
        for i in range(4):
            word = int.from_bytes(block[start + 4 * i : start + 4 * i + 4], "little")
            columns, high = i // 2, i % 2
            if weights is WeightFormat.INT4:
                halves = decode_int4(word)
            elif weights is WeightFormat.NVFP4:
                halves = decode_e2m1(word, 40)
            else:
                halves = decode_e2m1(word, exponents[4 * high + half * 2 + columns])
            quads[columns][high], quads[columns][2 + high] = halves
        for quad in quads:
            if weights is WeightFormat.NVFP4:
                found += [(quad[0], quad[1], 0, 0), (0, 0, quad[2], quad[3])]
            else:
                found.append((quad[0], quad[1], quad[2], quad[3]))
    return found


def row_scale(
    block: bytes, weights: WeightFormat, group: int, warp: int, lane: int, high: int, index: int
) -> float:
    """codes::RowScales::at."""
    row_bytes = FOUR_BITS[weights, group].plain[0].block_bytes // 128 - 64
    size = 2 if weights is WeightFormat.INT4 else 1
    start = 8192 + warp * 16 * row_bytes + lane // 4 * 2 * row_bytes + (high * (128 // group) + index) * size
    dtype = torch.float16 if weights is WeightFormat.INT4 else torch.float8_e4m3fn
    return torch.tensor(list(block[start : start + size]), dtype=torch.uint8).view(dtype).double().item()


def a_of_warp(registers: Callable[[int], tuple[int, int, int, int]]) -> Tensor:
    """float64 [16, 32]: a warp's rows of A, by the PTX ISA's figure of m64nNk32, of each lane's registers."""
    rows = torch.zeros(16, 32, dtype=torch.uint8)
    for lane in range(32):
        for i, register in enumerate(registers(lane)):
            row, column = lane // 4 + 8 * (i % 2), lane % 4 * 4 + 16 * (i // 2)
            rows[row, column : column + 4] = torch.tensor(
                list(register.to_bytes(4, "little")), dtype=torch.uint8
            )
    return rows.view(torch.float8_e4m3fn).double()


def sums(block: bytes, weights: WeightFormat, group: int, warp: int, a: Tensor) -> Tensor:
    """float64 [16, M]: a warp's sums of a K block for rows [M, 128] of a, before scales of rows and of a.

    As in codes::Consumer: products of the columns of a scale, each times that of its row.
    """
    lanes = [fragments(block, weights, group, warp, lane) for lane in range(32)]
    products = 1 if weights is WeightFormat.MXFP4 else 128 // group
    total = torch.zeros(16, len(a), dtype=torch.float64)
    per_product = max(len(lanes[0]) // products, 1)
    for index in range(products):
        acc = torch.zeros_like(total)
        for step in range(per_product):
            at = index * per_product + step
            first = index * 4 // products * 32 + step * 32
            acc += a_of_warp(lambda lane, at=at: lanes[lane][at]) @ a[:, first : first + 32].double().t()  # type: ignore[misc]
        for row in range(16):
            lane, high = row % 8 * 4, row // 8
            scale = (
                1.0
                if products == 1 and weights is WeightFormat.MXFP4
                else row_scale(block, weights, group, warp, lane, high, index)
            )
            total[row] += acc[row] * scale
    return total
