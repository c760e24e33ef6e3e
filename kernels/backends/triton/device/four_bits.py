"""Device code: products of FP8 rows and weights of four bits, both decoded to float16 in registers.

A byte has two columns of weights, and a word of 16 bits two of rows: the even columns are multiplied, then
the odd ones, so no number has to change its place. All that is multiplied is exact: codes of e2m1 lack a
factor of 2**14, rows one of 256 (see `decode`), and NVFP4's codes have their scales in them, 6 bits in all.
"""

import triton
import triton.language as tl

from expertd.kernels.backends.triton.device.numbers import decode_high

FP8_WEIGHTS, MXFP4, INT4, NVFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
BF16_SCALES, FP16_SCALES, FP32_SCALES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PAIRS = tl.constexpr(16)  # of columns, in a product; of INT4 and MXFP4 they have one scale
PARTS_OF_BLOCK = tl.constexpr(4)  # such products make up a block of 128 columns
SHARED_PAIRS = tl.constexpr(8)  # of them have one scale in NVFP4
NVFP4_FACTOR = tl.constexpr(32768.0)  # so that neither scales nor products leave the range of float16


@triton.jit
def decode_rows(words):
    """float16 of the (even, odd) columns of rows, two e4m3 codes in a word, divided by 256."""
    return decode_high(words << 8), decode_high(words)


@triton.jit
def decode_e2m1(words):
    """float16 of the codes in the highest four bits of int16, divided by 2**14: subnormals are subnormals."""
    return ((words & -0x8000) | ((words >> 3) & 0x0E00)).to(tl.float16, bitcast=True)


@triton.jit
def decode_int4(words):
    """float16 of two's complement in the lowest four bits of int16: 1032 + the number, minus 1032."""
    return ((words & 15) ^ 0x6408).to(tl.float16, bitcast=True) - 1032.0


@triton.jit
def decode_weights(data, WEIGHTS: tl.constexpr):
    """float16 of the (even, odd) columns of bytes."""
    words = data.to(tl.int16)
    if WEIGHTS == INT4:
        return decode_int4(words), decode_int4(words >> 4)
    return decode_e2m1(words << 12), decode_e2m1(words << 8)


@triton.jit
def scales_of_row(k, scales_of_block):
    """Scales of a row of weights, which has k bytes."""
    return k * scales_of_block // (PARTS_OF_BLOCK * PAIRS)


@triton.jit
def scale_of_part(part, scales_of_block):
    """Which of a row's scales a product has; 1 or 4 of them are of a block."""
    return part * scales_of_block // PARTS_OF_BLOCK


@triton.jit
def scale_at(b_scales, place, scale_dtype, WEIGHTS: tl.constexpr):
    """Where a scale is."""
    if WEIGHTS == INT4:
        place *= tl.where(scale_dtype == FP32_SCALES, 2, 1)
    return b_scales + place


@triton.jit
def load_scales(b_scales, places, scale_dtype, WEIGHTS: tl.constexpr):
    """The scales of a product's weights, fp32; of NVFP4 int16, two e4m3 codes.

    b_scales: MXFP4 uint8; INT4 int16, words of scale_dtype; NVFP4 int16.
    """
    if WEIGHTS == MXFP4:
        exponents = tl.load(b_scales + places).to(tl.int32)
        bits = tl.where(exponents == 0, 0x400000, exponents << 23)  # 2**-127 is subnormal
        scales = tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif WEIGHTS == NVFP4:
        scales = tl.load(b_scales + places)
    else:
        is_wide = scale_dtype == FP32_SCALES
        at = b_scales + places * tl.where(is_wide, 2, 1)
        low = tl.load(at, mask=is_wide, other=0)
        high = tl.load(at + is_wide.to(tl.int32))  # all that bf16 has of fp32
        wide = ((high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
        half = high.to(tl.float16, bitcast=True).to(tl.float32)
        scales = tl.where(scale_dtype == FP16_SCALES, half, wide)
    return scales


@triton.jit
def add_part(total, even, odd, data, row_scales, scales, SWAP: tl.constexpr, WEIGHTS: tl.constexpr):
    """total plus rows [BLOCK_M, 2 PAIRS] times weights, bytes [BLOCK_N, PAIRS], scaled.

    SWAP: see `add_product`.
    """
    low, high = decode_weights(data, WEIGHTS)
    if WEIGHTS == NVFP4:
        is_first = (tl.arange(0, PAIRS) < SHARED_PAIRS)[None, :]
        of_first, of_second = decode_high(scales << 8) * NVFP4_FACTOR, decode_high(scales) * NVFP4_FACTOR
        factors = tl.where(is_first, of_first[:, None], of_second[:, None])
        low, high = low * factors, high * factors
    if SWAP:
        products = tl.dot(high, tl.trans(odd), tl.dot(low, tl.trans(even)))
    else:
        products = tl.dot(odd, tl.trans(high), tl.dot(even, tl.trans(low)))
    row_scales *= missing_factor(WEIGHTS)
    factors = tl.broadcast_to(row_scales[None, :] if SWAP else row_scales[:, None], products.shape)
    if WEIGHTS != NVFP4:
        factors *= scales[:, None] if SWAP else scales[None, :]
    return tl.fma(products, factors, total)


@triton.jit
def missing_factor(WEIGHTS: tl.constexpr):
    """What products lack."""
    of_codes = 1.0 if WEIGHTS == INT4 else 16384.0
    of_scales = 256.0 / NVFP4_FACTOR if WEIGHTS == NVFP4 else 1.0
    return 256.0 * of_codes * of_scales
