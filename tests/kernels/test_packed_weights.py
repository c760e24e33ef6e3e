"""MXFP4 weights as Hopper's tiles read them: packed and unpacked, decoded as on the device, cached."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from expertd.kernels import FourBits, WeightFormat, decode, quantize_blocks
from expertd.kernels.backends.hopper.packed_weights import (
    BLOCK_BYTES,
    MOST_SPREAD,
    PackedCache,
    pack_mxfp4,
    unpack_mxfp4,
)
from expertd.kernels.ops.four_bits import mapped, packed_codes, tensors_of
from tests.kernels.helpers import fresh_generator

SIZES = [(128, 128, False), (256, 256, True), (200, 160, False), (384, 640, False), (512, 160, True)]


def random_mxfp4(num_groups: int, n: int, k: int, generator: torch.Generator) -> FourBits:
    """Every code, and scales as far apart as a block may have them."""
    data = torch.randint(0, 256, (num_groups, n, k // 2), dtype=torch.uint8, generator=generator)
    size = num_groups, n, k // 32
    scales = torch.randint(80, 81 + MOST_SPREAD, size, dtype=torch.uint8, generator=generator)
    return FourBits(data, scales, WeightFormat.MXFP4)


@pytest.mark.parametrize(("n", "k", "pairs"), SIZES)
def test_unpacked_they_are_the_same_numbers(n: int, k: int, pairs: bool) -> None:
    weights = random_mxfp4(3, n, k, fresh_generator())
    packed = pack_mxfp4(weights, pairs)
    assert packed.data.shape == (3, -(-n // 128), -(-k // 128), BLOCK_BYTES)
    assert torch.equal(torch.frexp(packed.scales).mantissa, torch.full_like(packed.scales, 0.5))
    unpacked = unpack_mxfp4(packed, k)
    assert torch.equal(decode(unpacked), decode(weights))
    assert unpacked.scales.shape == quantize_blocks(torch.zeros(3, n, k)).scales.shape


def test_negative_zeros_stay_negative() -> None:
    codes = torch.full((1, 128, 128), 8, dtype=torch.uint8)
    weights = FourBits(
        packed_codes(codes), torch.full((1, 128, 4), 127, dtype=torch.uint8), WeightFormat.MXFP4
    )
    assert torch.signbit(decode(unpack_mxfp4(pack_mxfp4(weights), 128))).all()


@pytest.mark.parametrize("exponent", [0, 1, 20, 127, 254])
def test_every_scale_can_be_packed(exponent: int) -> None:
    weights = random_mxfp4(1, 128, 128, fresh_generator())
    weights.scales.fill_(exponent)
    packed = pack_mxfp4(weights)
    assert (packed.scales >= torch.finfo(torch.float32).tiny).all()
    table = decode(unpack_mxfp4(packed, 128)._replace(scales=torch.ones(1, 1, 1))).double()
    expected = decode(weights._replace(scales=torch.full_like(weights.scales, 127))).double()
    assert torch.equal(table * packed.scales.double(), expected * 2.0 ** (exponent - 127))


def lane_fragments(block: bytes, warp: int, lane: int) -> list[int]:
    """The bytes that a lane has of wgmma's A, in order: what csrc/codes.cuh computes, by its comments."""
    found = [0] * 64
    for half in range(2):
        start = warp * 1024 + half * 512 + lane * 16
        exponents = 8192 + warp * 64 + lane // 4 * 8
        for i in range(4):
            word = int.from_bytes(block[start + 4 * i : start + 4 * i + 4], "little")
            group, high = half * 2 + i // 2, i % 2
            exponent = block[exponents + 4 * high + group]
            table = [0, *(value + exponent for value in (0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24))]
            for code in range(8):
                magnitude, last, byte = word >> 4 * code & 7, code // 4, code % 4
                sign = word >> (8 * byte + 3 if last else 8 * byte + 7) & 1
                found[(group * 4 + last * 2 + high) * 4 + byte] = table[magnitude] | sign << 7
    return found


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
    packed = pack_mxfp4(random_mxfp4(2, 256, 256, generator), pairs)
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
            assert lane_fragments(block, warp, lane) == expected_fragments(rows, warp, lane, pairs)


def test_scales_too_far_apart_are_refused() -> None:
    weights = random_mxfp4(2, 256, 256, fresh_generator())
    weights.scales.fill_(100)
    weights.data.fill_(0x11)
    weights.scales[1, 130, 3] = 100 + MOST_SPREAD + 1
    with pytest.raises(ValueError, match=r"at most 2\*\*11 between .* of 128x128, got 2\*\*12 in group 1"):
        pack_mxfp4(weights)
    weights.data[1, 130, 48:64] = 0x80  # now zeros, whose scale does not count
    assert torch.equal(decode(unpack_mxfp4(pack_mxfp4(weights), 256)), decode(weights))
    weights.scales[0, :128] = 90
    pack_mxfp4(weights)
    with pytest.raises(ValueError, match="of gates, and of the matching ups, got"):
        pack_mxfp4(weights._replace(scales=torch.where(weights.scales == 90, 80, weights.scales)), pairs=True)


def test_scales_that_are_no_numbers_are_refused() -> None:
    weights = random_mxfp4(2, 128, 128, fresh_generator())
    weights.scales[1, 0, 0] = 255
    weights.data[1, 0, 0] = 0x11
    with pytest.raises(ValueError, match="weights scales: expected no NaN, got one in group 1"):
        pack_mxfp4(weights)


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
    cache.refresh(given, [1], [pack_mxfp4(group, pairs=True)])
    assert cache.get(given, pairs=True).data.data_ptr() == kept.data.data_ptr()
    now = decode(unpack_mxfp4(cache.get(given, pairs=True), 128))
    assert torch.equal(now[1], decode(other)[1])
    assert torch.equal(now[::2], decode(weights)[::2])
    if frees:
        in_rows = cache.get(given)
        cache.refresh(given, [2], [pack_mxfp4(mapped(other, lambda tensor: tensor[2:]), pairs=True)])
        assert cache.get(given) is in_rows
        assert torch.equal(decode(unpack_mxfp4(in_rows, 128))[1:], decode(other)[1:])
    cache.refresh(random_mxfp4(1, 128, 128, generator), [], [])  # never seen: nothing to do
