"""Weights of four bits as csrc/codes.cuh reads them, and a cache of them."""

from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from expertd.kernels.backends.hopper.tiles import FOUR_BITS
from expertd.kernels.backends.weight_cache import WeightCache
from expertd.kernels.ops.four_bits import FourBits, W, Weights, codes_of, columns_of, mapped
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import SCALE_BLOCK
from expertd.weight_format import WeightFormat

_WARPS, _ROWS = 8, 8  # a tile's 128 rows: of each warp two times eight
_PAIRS_STEP = SCALE_BLOCK // 2  # gates in a tile of pairs
_CODE_BYTES = SCALE_BLOCK * SCALE_BLOCK // 2
MOST_SPREAD = 11
"""Powers of two by which MXFP4's scales of a block may differ: e4m3 has 2**-6 to 2**8, e2m1 four of them."""
_ABOVE_SCALE = 6  # the largest exponent of a block, above its scale: 6 * 2**6 = 384
_LEAST_SCALE = -126  # of a normal fp32
_BIAS = 127  # of UE8M0
_E4M3 = (0x00, 0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24)  # magnitudes of e2m1 times 2**-5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes
_FP16_EXPONENT = 15  # of the largest numbers in fp16


class PackedWeights(NamedTuple):
    """Weights [G, N, K] of four bits.

    data    uint8 [G, N/128, K/128, `TileConfig.block_bytes`], both rounded up: of a K block of 128 rows the
            codes, then the scales
    scales  MXFP4: fp32 [G, N/128, K/128], powers of two, each for a block of 128x128. Of pairs, whose N
            counts the gates: for one of them and that of the ups. Else fp32 [G, N rounded up]: each for a
            row, in the order of tiles
    n       N; of pairs, the gates
    pairs   rows are gates and the matching ups
    """

    data: Tensor
    scales: Tensor
    n: int
    pairs: bool


def pack(weights: FourBits, pairs: bool = False, first: int = 0) -> PackedWeights:
    """Pack weights [G, N, K], exactly.

    pairs  rows are N/2 gates and the matching ups, N/2 a multiple of 128; a tile gets 64 of each
    first  the number of the first group, for errors

    Waits for the device. Needs temporary memory for a group, 10 bytes a value. Raises ValueError if scales
    of columns are not finite; if MXFP4's of a block differ by more than 2**11; and if INT4's of a row are not
    fp16 numbers times a power of two, as all in fp16 are, and in bf16 those less than 2**32 apart. Scales of
    zeros do not count.
    """
    packed = empty_packed(weights, weights.data.device, pairs)
    for group in range(len(packed.data)):
        own = mapped(weights, lambda tensor, group=group: tensor[group])  # type: ignore[misc]
        _pack_group(own, first + group, pairs, packed.data[group], packed.scales[group])
    return packed


def empty_packed(weights: FourBits, device: torch.device, pairs: bool = False) -> PackedWeights:
    """Room on a device for packed weights of the size of `weights`, not initialized."""
    num_groups, n = weights.data.shape[:2]
    k_blocks = -(-columns_of(weights) // SCALE_BLOCK)
    blocks, block_bytes = -(-n // SCALE_BLOCK), _block_bytes(weights)
    scale_rows = -(-(n // 2 if pairs else n) // SCALE_BLOCK)
    of_group = (scale_rows, k_blocks) if weights.format is WeightFormat.MXFP4 else (blocks * SCALE_BLOCK,)
    data = torch.empty((num_groups, blocks, k_blocks, block_bytes), dtype=torch.uint8, device=device)
    scales = torch.empty((num_groups, *of_group), dtype=torch.float32, device=device)
    return PackedWeights(data, scales, n // 2 if pairs else n, pairs)


def unpack_mxfp4(packed: PackedWeights, k: int) -> Quantized:
    """MXFP4 weights [G, N, K] in FP8, exactly; with the scales that `packed` has."""
    num_groups, blocks = packed.data.shape[:2]
    codes = packed.data[..., :_CODE_BYTES].view(*packed.data.shape[:3], _WARPS, 2, _ROWS, 4, 2, 2, 4)
    magnitudes = torch.stack((codes & 7, codes >> 4 & 7), -1).flatten(-2)  # eight codes of a word
    signs = torch.cat((codes >> 7, codes >> 3 & 1), -1)
    exponents = packed.data[..., _CODE_BYTES:].view(*packed.data.shape[:3], _WARPS, _ROWS, 2, 2, 2)
    # [.., warp, half of columns, row, four columns, next 32, high rows, code] as the exponents' order
    above = exponents.permute(0, 1, 2, 3, 6, 4, 7, 5)[..., None, :, :, None]
    table = torch.tensor(_E4M3, dtype=torch.uint8, device=packed.data.device)
    e4m3 = table[magnitudes.int()]
    e4m3 = torch.where(magnitudes > 0, e4m3 + above, 0) | signs << 7
    e4m3 = e4m3.view(*e4m3.shape[:-1], 2, 4)
    # [group, tile, warp, high, row, K block, half, 32 of them, last 16, four of them, code]
    rows = e4m3.permute(0, 1, 3, 8, 5, 2, 4, 7, 9, 6, 10).reshape(num_groups, blocks, SCALE_BLOCK, -1)
    n, scales = packed.n, packed.scales
    if packed.pairs:
        tiles = rows.view(num_groups, blocks, _WARPS, 2, _ROWS, -1).transpose(2, 3).transpose(1, 2)
        rows, n, scales = tiles, 2 * n, scales.repeat(1, 2, 1)
    data = rows.reshape(num_groups, blocks * SCALE_BLOCK, -1)[:, :n, :k].contiguous()
    return Quantized(data.view(torch.float8_e4m3fn), scales)


class PackedCache:
    """Packed weights by the identity of the caller's tensors, dropped when those are freed."""

    def __init__(self) -> None:
        self._caches = [WeightCache[PackedWeights](partial(_packed, pairs=pairs)) for pairs in (False, True)]
        self._rooms: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()

    def get(self, weights: FourBits, pairs: bool = False) -> PackedWeights:
        """The weights, packed again if they have been modified or replaced: see `pack`.

        Those that only `packed` has, in pairs, get a copy in the order of rows; those of `room` a new one for
        each call, since others write to it.
        """
        cache, paired = self._caches[pairs], self._caches[True]
        if not pairs and weights.data.is_meta and not cache.kept(weights):
            unpaired = _unpaired(paired.get(weights)[0])
            if weights.data in self._rooms:
                return unpaired
            cache.keep(weights, (unpaired,))
        return cache.get(weights)[0]

    def packed(self, weights: W, pairs: bool = False) -> W:
        """Weights whose data is only a key, on the meta device."""
        return self._caches[pairs].packed(weights)

    def room(self, weights: FourBits, device: torch.device, pairs: bool = False) -> PackedWeights:
        """Zeros, from which calls with these weights read: on the meta device, only a key."""
        packed = empty_packed(weights, device, pairs)
        packed.data.zero_()
        packed.scales.zero_()
        self._caches[pairs].keep(weights, (packed,))
        self._rooms[weights.data] = None
        return packed

    def refresh(
        self, weights: FourBits, groups: Sequence[int], replacements: Sequence[PackedWeights]
    ) -> None:
        """Overwrite groups, each with one packed [1, ..], in the memory that captured calls read."""
        for cache in self._caches:
            for packed in cache.kept(weights):
                for group, replacement in zip(groups, replacements, strict=True):
                    new = _unpaired(replacement) if replacement.pairs and not packed.pairs else replacement
                    packed.data[group].copy_(new.data[0])
                    packed.scales[group].copy_(new.scales[0])
                cache.refresh(weights, [0], [packed])


def _unpaired(packed: PackedWeights) -> PackedWeights:
    """Pairs in the order of rows: gates, then ups. Eight rows stay together."""
    num_groups, tiles, k_blocks, block_bytes = packed.data.shape

    def moved(part: Tensor, size: int) -> Tensor:
        # [group, tile, K block, warp, .., gates and ups, bytes]
        rows = part.reshape(num_groups, tiles, k_blocks, _WARPS, -1, 2, size).permute(0, 5, 1, 3, 2, 4, 6)
        rows = rows.reshape(num_groups, tiles, _WARPS, 2, k_blocks, -1, size).permute(0, 1, 4, 2, 5, 3, 6)
        return rows.reshape(num_groups, tiles, k_blocks, -1)

    codes, scales = packed.data[..., :_CODE_BYTES], packed.data[..., _CODE_BYTES:]
    data = torch.cat((moved(codes, 4), moved(scales, (block_bytes - _CODE_BYTES) // SCALE_BLOCK)), -1)
    if packed.scales.dim() == 3:  # of blocks
        of_rows = packed.scales.repeat(1, 2, 1)
    else:
        of_rows = packed.scales.view(num_groups, -1, 2, _ROWS).transpose(1, 2).reshape(num_groups, -1)
    return PackedWeights(data, of_rows, 2 * packed.n, pairs=False)


def _packed(weights: Weights, pairs: bool) -> tuple[PackedWeights, ...]:
    if not isinstance(weights, FourBits):
        raise TypeError(f"weights: expected FourBits, got {type(weights).__name__}")
    return (pack(weights, pairs),)


def _block_bytes(weights: FourBits) -> int:
    return FOUR_BITS[weights.format, weights.group_size].plain[0].block_bytes


def _pack_group(weights: FourBits, group: int, pairs: bool, data: Tensor, scales: Tensor) -> None:
    """Write data [N/128, K/128, block bytes] and scales of a group [N, K]."""
    blocks, k_blocks = data.shape[:2]
    codes = _padded(codes_of(weights.data), blocks * SCALE_BLOCK, k_blocks * SCALE_BLOCK)
    group_size = weights.group_size
    given = _padded(
        weights.scales.view(_INTEGERS[weights.scales.itemsize]), len(codes), codes.shape[1] // group_size
    )
    given = given.view(weights.scales.dtype)
    magnitudes = codes if weights.format is WeightFormat.INT4 else codes & 7
    is_zero = (magnitudes.view(*given.shape, group_size) == 0).all(-1)
    if weights.format is WeightFormat.MXFP4:
        stored = _exponents(given, is_zero, group, pairs, scales)
    else:
        stored, of_rows = _row_scales(weights, given, is_zero, group)
        scales.copy_(_interleaved(of_rows[:, None])[:, 0] if pairs else of_rows)
    if pairs:
        codes, stored = _interleaved(codes), _interleaved(stored)

    # [tile, warp, high rows, row, K block, half of columns, 32 of them, last 16 of these, four of them, code]
    codes = codes.view(blocks, _WARPS, 2, _ROWS, k_blocks, 2, 2, 2, 4, 4)
    codes = codes.permute(0, 4, 1, 5, 3, 8, 6, 2, 7, 9).flatten(-2)  # a word's eight codes last
    lower, signs = codes & 7, codes >> 3
    words = lower[..., 0::2] | lower[..., 1::2] << 4 | signs[..., :4] << 7 | signs[..., 4:] << 3
    data[..., :_CODE_BYTES] = words.reshape(blocks, k_blocks, -1)
    stored = stored.view(blocks, _WARPS, 2, _ROWS, k_blocks, -1).permute(0, 4, 1, 3, 2, 5)
    data[..., _CODE_BYTES:] = stored.reshape(blocks, k_blocks, -1)


def _exponents(scales: Tensor, is_zero: Tensor, group: int, pairs: bool, of_blocks: Tensor) -> Tensor:
    """uint8 [N, K/32]: what codes.cuh adds to exponents of e4m3, for MXFP4; writes the scales of blocks."""
    exponents = scales.to(torch.int16) - _BIAS
    if bool((exponents[~is_zero] > _BIAS).any()):
        raise ValueError(f"weights scales: expected no NaN, got one in group {group}")
    above = exponents.sub_(_shared_exponents(exponents, is_zero, group, pairs, of_blocks)).mul_(8)
    return above.masked_fill_(is_zero, 0).to(torch.uint8)


def _row_scales(weights: FourBits, scales: Tensor, is_zero: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Scales of columns as bytes [N, ..], and fp32 [N] that multiply those of a row; exact."""
    if weights.whole is not None:
        codes = scales.view(torch.uint8).masked_fill(is_zero, 0)
        if bool((codes & 0x7F == 0x7F).any()):
            raise ValueError(f"weights scales: expected no NaN, got one in group {group}")
        return codes, torch.nn.functional.pad(weights.whole, (0, len(scales) - len(weights.whole)))
    given = scales.double().masked_fill(is_zero, 0)
    if not bool(given.isfinite().all()):
        raise ValueError(f"weights scales: expected finite numbers, got others in group {group}")
    most = torch.frexp(given.abs().amax(-1, keepdim=True)).exponent - 1
    power = (most - _FP16_EXPONENT).clamp_(min=_LEAST_SCALE)
    scaled = torch.ldexp(given, -power)
    stored = scaled.to(torch.float16)
    if not torch.equal(stored.double(), scaled):
        raise ValueError(
            "weights scales: expected numbers that float16 holds, if those of a row are multiplied by a power"
            f" of two, got others in group {group}"
        )
    return stored.view(torch.uint8), torch.ldexp(torch.ones_like(given[:, 0]), power[:, 0]).float()


def _shared_exponents(exponents: Tensor, is_zero: Tensor, group: int, pairs: bool, scales: Tensor) -> Tensor:
    """int16 [N, K/32]: what to subtract from exponents, so that 0 to 11 are left; writes scales."""
    rows = 2 if pairs else 1  # times 128, of a scale
    k_blocks = scales.shape[1]
    shape = rows, -1, SCALE_BLOCK, k_blocks, exponents.shape[1] // k_blocks
    each, counts = exponents.view(shape), ~is_zero.view(shape)
    most = each.where(counts, _LEAST_SCALE).amax((0, 2, 4))
    least = each.where(counts, most[None, :, None, :, None]).amin((0, 2, 4))
    spread = int((most - least).max())
    if spread > MOST_SPREAD:
        raise ValueError(
            f"weights scales: expected at most 2**{MOST_SPREAD} between those of a block of 128x128"
            f"{' of gates, and of the matching ups' if pairs else ''}, got 2**{spread} in group {group}"
        )
    scale = (most - _ABOVE_SCALE).clamp_(min=_LEAST_SCALE)
    scales.copy_(torch.ldexp(torch.ones_like(scales), scale.to(torch.int32)))
    base = (scale - (MOST_SPREAD - _ABOVE_SCALE))[None, :, None, :, None]
    return base.expand(shape[0], *each.shape[1:]).reshape(exponents.shape)


def _interleaved(rows: Tensor) -> Tensor:
    """Rows [N, ..] of gates, then ups: of each tile eight gates, the matching ups, and so on."""
    tiles = rows.view(2, -1, _WARPS, _ROWS, rows.shape[-1])
    return tiles.permute(1, 2, 0, 3, 4).reshape(rows.shape)


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    missing = columns - matrix.shape[1], rows - matrix.shape[0]
    return torch.nn.functional.pad(matrix, (0, missing[0], 0, missing[1])) if any(missing) else matrix
