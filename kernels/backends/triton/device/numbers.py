"""Device code: FP8 (e4m3) in integer arithmetic, the same on every device, and quantization by it."""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
INVERSE_MAX = tl.constexpr(1 / 448)
# Below this a scale would be subnormal; see kernels/ops/quantize.py.
MIN_AMAX = tl.constexpr(448 * 2.0**-126)


@triton.jit
def decode(codes):
    """float16 of e4m3 codes uint8, divided by 256: float16's exponent bias is 15, and e4m3's is 7."""
    bits = (
        codes.to(tl.int8, bitcast=True).to(tl.int16) << 7
    )  # the sign, extended, with exponent and mantissa ...
    bits &= -0x4080  # ... without the copies of the sign between them
    return tl.where((codes & 0x7F) == 0x7F, 0x7E00, bits).to(
        tl.float16, bitcast=True
    )  # else NaN would be 480


@triton.jit
def decode_high(words):
    """As `decode`, of codes in the upper bytes of int16; with it, FP8 tiles of 128 rows would spill."""
    bits = (words >> 1) & -0x4080  # the sign, exponent and mantissa, without a copy of the sign between
    return tl.where((bits & 0x3F80) == 0x3F80, 0x7E00, bits).to(
        tl.float16, bitcast=True
    )  # else NaN would be 480


@triton.jit
def encode(values):
    """e4m3 codes uint8 of fp32 values up to 464, to the nearest, ties to even; of NaN a NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)  # exponent bias 127 to 7
    # Adding 2**14, whose last place is e4m3's smallest number, rounds to multiples of that.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)  # 2**-6, the smallest normal number
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return ((bits >> 24) & 0x80 | code).to(tl.uint8)


@triton.jit
def scale_of(amax):
    """The scale of a block by its largest absolute value, as `quantize_rows` has it; NaN of NaN."""
    return tl.where(amax < MIN_AMAX, MIN_AMAX, amax) * INVERSE_MAX


@triton.jit
def _larger(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def largest(values, AXIS: tl.constexpr):
    """The largest absolute value along an axis; NaN if there is one."""
    return tl.reduce(tl.abs(values), AXIS, _larger)
