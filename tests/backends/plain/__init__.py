"""A further backend, with the least that one has: products of each group in float32, on any device."""

from itertools import pairwise
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels import Quantized, Weights, decode, dequantize_rows
from expertd.kernels.backends.base import Backend
from expertd.kernels.ops.four_bits import mapped


class PlainBackend(Backend):
    """Has no graphs, request tables, exchange or partitions."""

    name: ClassVar[str] = "plain"

    def __init__(self) -> None:
        self.capabilities = BACKENDS["plain"]

    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: int | None) -> None:
        for group, (start, end) in enumerate(pairwise(offsets.tolist())):
            part = slice(start, end)
            out[part] = _product(Quantized(a.data[part], a.scales[part]), b, group)

    def masked(
        self,
        a: Quantized,
        b: Weights,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        for group, count in enumerate(counts.tolist()):
            rows = Quantized(a.data[group, :count], a.scales[group, :count])
            out[group, :count] = _product(rows, b, group)


def _product(rows: Quantized, b: Weights, group: int) -> Tensor:
    weights = decode(mapped(b, itemgetter(group)))
    return (dequantize_rows(*rows, torch.float32) @ weights.float().t()).to(torch.bfloat16)


def why_not(device: torch.device | None) -> str | None:
    """None if its device type is here."""
    wants = BACKENDS["plain"].device_type
    return None if wants != "cuda" or torch.cuda.is_available() else "no CUDA device"


def create() -> Backend:
    """The backend."""
    return PlainBackend()
