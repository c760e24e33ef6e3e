"""A backend without a GPU that packs weights of four bits as hopper does."""

from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels import Backend, FourBits, Quantized, WeightFormat, Weights, decode, dequantize_rows
from expertd.kernels.backends.hopper.backend import HopperBackend
from expertd.kernels.backends.hopper.packed_weights import PackedWeights
from expertd.kernels.ops.four_bits import mapped, packed_codes


def unpacked(packed: PackedWeights, like: FourBits) -> FourBits:
    """The weights [G, N, K], by what `pack` says of its bytes."""
    (count, tiles, k_blocks), size = packed.data.shape[:3], like.group_size
    codes = packed.data[..., :8192].view(count, tiles, k_blocks, 8, 2, 8, 4, 2, 2, 4)
    lower = torch.stack((codes & 7, codes >> 4 & 7), -1).flatten(-2)
    codes = lower | torch.cat((codes >> 7, codes >> 3 & 1), -1) << 3
    codes = codes.view(*codes.shape[:-1], 2, 4).permute(0, 1, 3, 8, 5, 2, 4, 7, 9, 6, 10)
    scales = packed.data[..., 8192:].view(count, tiles, k_blocks, 8, 8, 2, -1).permute(0, 1, 3, 5, 4, 2, 6)
    rows = [each.reshape(count, tiles * 128, -1) for each in (codes, scales)]
    whole = packed.scales if packed.scales.dim() == 2 else None
    if packed.pairs:
        rows = [_in_order(each) for each in rows]
        whole = None if whole is None else _in_order(whole[..., None])[..., 0]
    data, scales = packed_codes(rows[0]), rows[1].contiguous()
    if like.format is WeightFormat.NVFP4:
        return FourBits(data, scales.view(torch.float8_e4m3fn), like.format, whole)
    if whole is not None:
        return FourBits(data, scales.view(torch.float16).float() * whole[..., None], like.format)
    above = packed.scales.log2().repeat(1, 2 if packed.pairs else 1, 1).to(torch.int16) - 5 + 127
    exponents = scales // 8 + above.repeat_interleave(128, 1).repeat_interleave(128 // size, 2)
    return FourBits(data, exponents.to(torch.uint8), like.format)


def _in_order(rows: Tensor) -> Tensor:
    """Gates, then ups, of rows [G, N, ..] that a tile has eight by eight."""
    tiles = rows.view(len(rows), -1, 8, 2, 8, rows.shape[-1])
    return tiles.permute(0, 3, 1, 2, 4, 5).reshape(rows.shape)


class Unpacking(HopperBackend):
    """Packs as hopper does, and multiplies by what the copy of each group says; of `room`, also in pairs."""

    capabilities = replace(
        BACKENDS["hopper"], device_type=None, captures=False, request_table=False, device_calls=False,
        joint_exchange=False, partitions=False,
    )  # fmt: skip
    ffn, experts, experts_in_parts = Backend.ffn, Backend.experts, Backend.experts_in_parts
    route, choose_experts, unpermute = Backend.route, Backend.choose_experts, Backend.unpermute

    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: Any) -> None:
        rows = dequantize_rows(*a, torch.float32)
        for group, (start, end) in enumerate(pairwise(offsets.tolist())):
            if end > start:
                matrix = self._matrix(b, group)
                for row in range(start, end):  # one by one: a GEMM's bits may depend on its height
                    out[row] = matrix @ rows[row]

    def _matrix(self, b: Weights, group: int) -> Tensor:
        """fp32 [N, K]."""
        if not isinstance(b, FourBits):
            return decode(mapped(b, itemgetter(group)))
        cache = self._gemm.packed_weights
        packed = cache.get(b, pairs=bool(cache._caches[True].kept(b)))
        part = slice(group, group + 1)
        return decode(unpacked(packed._replace(data=packed.data[part], scales=packed.scales[part]), b))[0]
