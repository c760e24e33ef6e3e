"""Weights of four bits as Hopper's tiles read them: packed and unpacked, decoded as on the device, cached."""

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from operator import itemgetter

import pytest
import torch
from torch import Tensor

from expertd.kernels import FourBits, WeightFormat, decode, quantize_blocks
from expertd.kernels.backends.hopper.packed_weights import (
    MOST_SPREAD,
    PackedCache,
    pack,
    unpack_mxfp4,
)
from expertd.kernels.backends.hopper.tiles import FOUR_BITS, MXFP4_FEW
from expertd.kernels.ops.four_bits import group_size_of, mapped, packed_codes, quantize_int4, tensors_of
from tests.kernels.four_bit_registers import decode_e2m1, decode_int4, fragments, sums, words_of
from tests.kernels.helpers import fresh_generator

SIZES = [(128, 128, False), (256, 256, True), (200, 160, False), (384, 640, False), (512, 160, True)]


def random_mxfp4(num_groups: int, n: int, k: int, generator: torch.Generator) -> FourBits:
    """Every code, and scales as far apart as a block may have them."""
    data = torch.randint(0, 256, (num_groups, n, k // 2), dtype=torch.uint8, generator=generator)
    size = num_groups, n, k // 32
    scales = torch.randint(80, 81 + MOST_SPREAD, size, dtype=torch.uint8, generator=generator)
    return FourBits(data, scales, WeightFormat.MXFP4)


def random_int4(
    num_groups: int,
    n: int,
    k: int,
    generator: torch.Generator,
    group: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> FourBits:
    """Every code, and scales of both signs."""
    data = torch.randint(0, 256, (num_groups, n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randn(num_groups, n, k // group, generator=generator).to(dtype)
    return FourBits(data, scales, WeightFormat.INT4)


def random_nvfp4(num_groups: int, n: int, k: int, generator: torch.Generator) -> FourBits:
    """Every code, every scale that is a number, and another scale of scales for each row."""
    data = torch.randint(0, 256, (num_groups, n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 254, (num_groups, n, k // 16), dtype=torch.uint8, generator=generator)
    scales = torch.where(scales == 0x7F, 0x7E, scales).view(torch.float8_e4m3fn)
    whole = torch.rand(num_groups, n, generator=generator) + 0.1
    return FourBits(data, scales, WeightFormat.NVFP4, whole)


RANDOM: dict[str, Callable[[int, int, int, torch.Generator], FourBits]] = {
    "MXFP4": random_mxfp4,
    "INT4 g32": random_int4,
    "INT4 g128": partial(random_int4, group=128, dtype=torch.float16),
    "NVFP4": random_nvfp4,
}
each_format = pytest.mark.parametrize("random", RANDOM.values(), ids=RANDOM.keys())


def test_every_code_in_every_place_is_decoded_exactly() -> None:
    """INT4's from -8 to 7, e2m1's with every exponent that MXFP4 adds; both halves of a word."""
    e2m1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    signed = torch.tensor([*e2m1, *(-value for value in e2m1)])
    for code, place in itertools.product(range(16), range(8)):
        codes = [(code + 5 * (i - place)) % 16 for i in range(8)]
        word = words_of(codes)
        two = torch.tensor(codes) ^ 8
        assert torch.equal(_values(decode_int4(word)), (two - 8).float())
        for above in range(MOST_SPREAD + 1):
            got = _values(decode_e2m1(word, 8 * above))
            assert torch.equal(got, signed[codes] * 2.0 ** (above - 5))
            assert torch.equal(got.signbit(), torch.tensor(codes) > 7)


def _values(words: tuple[int, int]) -> Tensor:
    return (
        torch.tensor(list(b"".join(word.to_bytes(4, "little") for word in words)), dtype=torch.uint8)
        .view(torch.float8_e4m3fn)
        .float()
    )


@pytest.mark.parametrize("pairs", [False, True])
@each_format
def test_a_warps_sums_are_what_the_weights_mean(
    random: Callable[[int, int, int, torch.Generator], FourBits], pairs: bool
) -> None:
    """Registers, products and scales as the device has them, against float64 of the decoded weights."""
    generator = fresh_generator()
    weights = random(2, 256, 256, generator)
    packed, a = pack(weights, pairs), torch.randint(-8, 9, (16, 256), generator=generator)
    expected = a.double() @ decode(weights, torch.float64)[1].t()
    expected = (
        expected if weights.whole is None else a.double() @ _exactly(mapped(weights, itemgetter(1))).t()
    )
    for tile, warp in itertools.product(range(2), (0, 5)):
        total = torch.zeros(16, 16, dtype=torch.float64)
        for kb in range(2):
            block = bytes(packed.data[1, tile, kb].tolist())
            part = sums(block, weights.format, group_size_of(weights), warp, a[:, kb * 128 : kb * 128 + 128])
            if weights.format is WeightFormat.MXFP4:
                part *= packed.scales[1, 0 if pairs else tile, kb].double()
            total += part
        first = tile * 128 + warp * 16
        if weights.format is not WeightFormat.MXFP4:
            total *= packed.scales[1, first : first + 16, None].double()
        rows = torch.arange(first, first + 16)
        if pairs:
            gates = tile * 64 + warp * 8 + torch.arange(8)
            rows = torch.cat((gates, 128 + gates))
        assert torch.equal(total.t(), expected[:, rows])


def _exactly(weights: FourBits) -> Tensor:
    """float64 [N, K] of NVFP4: products of three numbers, without a rounding."""
    assert weights.whole is not None
    plain = decode(weights._replace(whole=torch.ones_like(weights.whole)), torch.float64)
    return plain * weights.whole.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [32, 128])
def test_scales_of_int4_are_kept_exactly_or_refused(group: int, dtype: torch.dtype) -> None:
    generator = fresh_generator()
    weights = random_int4(2, 128, 256, generator, group, torch.bfloat16)
    weights = weights._replace(scales=weights.scales.to(dtype))
    pack(weights)
    weights.data.fill_(0x11)
    weights.scales[1, 5, 0], weights.scales[1, 5, 1] = 2.0**15, 2.0**-17
    if dtype is not torch.float16:
        pack(weights)
        weights.scales[1, 5, 1] = 2.0**-26
        with pytest.raises(ValueError, match=r"that float16 holds, .* got others in group 1"):
            pack(weights)
        weights.data[1, 5] = 0  # scales of zeros do not count
        pack(weights)
    weights.data.fill_(0x11)
    weights.scales[1, 5, 1] = torch.nan
    with pytest.raises(ValueError, match="weights scales: expected finite numbers, got others in group 1"):
        pack(weights)


def test_scales_with_more_bits_than_fp16_are_refused() -> None:
    weights = quantize_int4(torch.randn(2, 128, 256, generator=fresh_generator()), 128, torch.float32)
    with pytest.raises(
        ValueError, match=r"weights scales: expected numbers that float16 holds, .* in group 0"
    ):
        pack(weights)


@pytest.mark.parametrize("frees", [False, True])
@each_format
def test_groups_of_every_format_are_replaced_in_place(
    random: Callable[[int, int, int, torch.Generator], FourBits], frees: bool
) -> None:
    """Also of weights that only the cache has, in pairs and, made of them, in the order of rows."""
    cache, generator = PackedCache(), fresh_generator()
    weights, other = (random(3, 256, 256, generator) for _ in range(2))
    given = cache.packed(weights, pairs=True) if frees else weights
    paired, plain = cache.get(given, pairs=True), cache.get(given)
    assert torch.equal(plain.data, pack(weights).data)
    assert torch.equal(plain.scales, pack(weights).scales) or weights.format is WeightFormat.MXFP4
    if not frees:
        for target, source in zip(tensors_of(weights), tensors_of(other), strict=True):
            target[1] = source[1]
    cache.refresh(given, [1], [pack(mapped(other, lambda tensor: tensor[1:2]), pairs=True)])
    assert cache.get(given, pairs=True) is paired
    assert cache.get(given) is plain
    assert torch.equal(paired.data[1], pack(other, pairs=True).data[1])
    assert torch.equal(plain.data[1], pack(other).data[1]) or weights.format is WeightFormat.MXFP4
    assert torch.equal(paired.scales[0], pack(weights, pairs=True).scales[0])


@each_format
def test_room_is_read_as_it_is_written_to_by_pointers(
    random: Callable[[int, int, int, torch.Generator], FourBits],
) -> None:
    """In the order of rows it has no copy of its own, which would not be written to."""
    cache, weights = PackedCache(), random(3, 256, 256, fresh_generator())
    key, packed = mapped(weights, lambda tensor: tensor.to("meta")), pack(weights, pairs=True)
    room = cache.room(key, torch.device("cpu"), pairs=True)
    assert cache.get(key, pairs=True) is room
    assert not cache.get(key).data.any()
    for to, source in ((room.data, packed.data), (room.scales, packed.scales)):
        assert to.shape == source.shape
        to.numpy()[:] = source.numpy()  # no version counter notices it
    assert cache.get(key, pairs=True) is room
    plain = PackedCache()
    assert torch.equal(cache.get(key).data, plain.get(plain.packed(weights, pairs=True)).data)


@pytest.mark.parametrize("weights", FOUR_BITS)
def test_blocks_have_the_bytes_of_the_format(weights: tuple[WeightFormat, int]) -> None:
    """Half a byte a code, and a row's scales: MXFP4's and NVFP4's of a byte, INT4's of two."""
    few, many = FOUR_BITS[weights].plain
    size = 2 if weights[0] is WeightFormat.INT4 else 1
    assert few.block_bytes == many.block_bytes == 128 * (64 + 128 // weights[1] * size)


@pytest.mark.parametrize(("n", "k", "pairs"), SIZES)
def test_unpacked_they_are_the_same_numbers(n: int, k: int, pairs: bool) -> None:
    weights = random_mxfp4(3, n, k, fresh_generator())
    packed = pack(weights, pairs)
    assert packed.data.shape == (3, -(-n // 128), -(-k // 128), MXFP4_FEW.block_bytes)
    assert torch.equal(torch.frexp(packed.scales).mantissa, torch.full_like(packed.scales, 0.5))
    unpacked = unpack_mxfp4(packed, k)
    assert torch.equal(decode(unpacked), decode(weights))
    assert unpacked.scales.shape == quantize_blocks(torch.zeros(3, n, k)).scales.shape


def test_negative_zeros_stay_negative() -> None:
    codes = torch.full((1, 128, 128), 8, dtype=torch.uint8)
    weights = FourBits(
        packed_codes(codes), torch.full((1, 128, 4), 127, dtype=torch.uint8), WeightFormat.MXFP4
    )
    assert torch.signbit(decode(unpack_mxfp4(pack(weights), 128))).all()


@pytest.mark.parametrize("exponent", [0, 1, 20, 127, 254])
def test_every_scale_can_be_packed(exponent: int) -> None:
    weights = random_mxfp4(1, 128, 128, fresh_generator())
    weights.scales.fill_(exponent)
    packed = pack(weights)
    assert (packed.scales >= torch.finfo(torch.float32).tiny).all()
    table = decode(unpack_mxfp4(packed, 128)._replace(scales=torch.ones(1, 1, 1))).double()
    expected = decode(weights._replace(scales=torch.full_like(weights.scales, 127))).double()
    assert torch.equal(table * packed.scales.double(), expected * 2.0 ** (exponent - 127))


def expected_fragments(rows: Tensor, warp: int, lane: int, pairs: bool) -> list[int]:
    """The same of e4m3 rows [128, 128] as uint8, by the PTX ISA's figure of m64nNk32's A.

    pairs  the first 64 are gates, the last 64 ups
    """
    found = []
    for register in range(16):
        group, high, last = register // 4, register % 2, register % 4 // 2
        row = warp * 8 + lane // 4 + 64 * high if pairs else warp * 16 + lane // 4 + 8 * high
        column = group * 32 + last * 16 + lane % 4 * 4
        found += rows[row, column : column + 4].tolist()
    return found


@pytest.mark.parametrize("pairs", [False, True])
def test_lanes_decode_their_fragments(pairs: bool) -> None:
    generator = fresh_generator()
    packed = pack(random_mxfp4(2, 256, 256, generator), pairs)
    e4m3 = unpack_mxfp4(packed, 256).data.view(torch.uint8)
    for tile in range(2):
        columns = slice(128, 256)
        if pairs:
            gates = e4m3[1, tile * 64 : tile * 64 + 64, columns]
            rows = torch.cat((gates, e4m3[1, 128 + tile * 64 : 192 + tile * 64, columns]))
        else:
            rows = e4m3[1, tile * 128 : tile * 128 + 128, columns]
        block = bytes(packed.data[1, tile, 1].tolist())
        for thread in range(256):
            warp, lane = divmod(thread, 32)
            registers = itertools.chain(*fragments(block, WeightFormat.MXFP4, 32, warp, lane))
            found = [byte for register in registers for byte in register.to_bytes(4, "little")]
            assert found == expected_fragments(rows, warp, lane, pairs)


def test_scales_too_far_apart_are_refused() -> None:
    weights = random_mxfp4(2, 256, 256, fresh_generator())
    weights.scales.fill_(100)
    weights.data.fill_(0x11)
    weights.scales[1, 130, 3] = 100 + MOST_SPREAD + 1
    with pytest.raises(ValueError, match=r"at most 2\*\*11 between .* of 128x128, got 2\*\*12 in group 1"):
        pack(weights)
    weights.data[1, 130, 48:64] = 0x80  # now zeros, whose scale does not count
    assert torch.equal(decode(unpack_mxfp4(pack(weights), 256)), decode(weights))
    weights.scales[0, :128] = 90
    pack(weights)
    with pytest.raises(ValueError, match="of gates, and of the matching ups, got"):
        pack(weights._replace(scales=torch.where(weights.scales == 90, 80, weights.scales)), pairs=True)


def test_scales_that_are_no_numbers_are_refused() -> None:
    weights = random_mxfp4(2, 128, 128, fresh_generator())
    weights.scales[1, 0, 0] = 255
    weights.data[1, 0, 0] = 0x11
    with pytest.raises(ValueError, match="weights scales: expected no NaN, got one in group 1"):
        pack(weights)


def test_the_cache_lives_as_long_as_the_data_and_notices_changes() -> None:
    cache, weights = PackedCache(), random_mxfp4(2, 128, 128, fresh_generator())
    first = cache.get(weights)
    assert cache.get(weights) is first
    weights.scales[0].add_(1)
    second = cache.get(weights)
    assert torch.equal(second.scales[0], 2 * first.scales[0])
    watched = weakref.ref(second.data)
    del first, second, weights
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("frees", [False, True])
def test_groups_are_replaced_in_place(frees: bool) -> None:
    cache, generator = PackedCache(), fresh_generator()
    weights, other = (random_mxfp4(3, 256, 128, generator) for _ in range(2))
    given = cache.packed(weights, pairs=True) if frees else weights
    assert given.data.is_meta is frees
    kept = cache.get(given, pairs=True)
    group = mapped(other, lambda tensor: tensor[1:2])
    if not frees:
        for target, source in zip(tensors_of(weights), tensors_of(other), strict=True):
            target[1] = source[1]
    cache.refresh(given, [1], [pack(group, pairs=True)])
    assert cache.get(given, pairs=True).data.data_ptr() == kept.data.data_ptr()
    now = decode(unpack_mxfp4(cache.get(given, pairs=True), 128))
    assert torch.equal(now[1], decode(other)[1])
    assert torch.equal(now[::2], decode(weights)[::2])
    if frees:
        in_rows = cache.get(given)
        cache.refresh(given, [2], [pack(mapped(other, lambda tensor: tensor[2:]), pairs=True)])
        assert cache.get(given) is in_rows
        assert torch.equal(decode(unpack_mxfp4(in_rows, 128))[1:], decode(other)[1:])
    cache.refresh(random_mxfp4(1, 128, 128, generator), [], [])  # never seen: nothing to do
