"""The plain PyTorch backend: right on any device and quick on a CPU."""

import weakref
from collections.abc import MutableMapping
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.backends.base import Backend
from kernels.quantize import dequantize_blocks, dequantize_rows


class ReferenceBackend(Backend):
    """One bf16 matmul per non-empty group, on weights dequantised once and kept while the caller's live."""

    name: ClassVar[str] = "reference"

    def __init__(self) -> None:
        self._weights = _WeightCache()

    def contiguous(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        offsets: Tensor,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        weights = self._weights.get(b, b_scales)
        rows = dequantize_rows(a, a_scales, torch.bfloat16)
        bounds = offsets.tolist()
        for group, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                torch.mm(rows[start:end], weights[group].t(), out=out[start:end])

    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        weights = self._weights.get(b, b_scales)
        for group, count in enumerate(counts.tolist()):
            if count > 0:
                rows = dequantize_rows(a[group, :count], a_scales[group, :count], torch.bfloat16)
                torch.mm(rows, weights[group].t(), out=out[group, :count])


_Entry = tuple[weakref.ref[Tensor], tuple[int, int], Tensor]  # scales, versions, weights


class _WeightCache:
    """Dequantised weights by the identity of the caller's tensors, forgotten when those are freed."""

    def __init__(self) -> None:
        self._entries: MutableMapping[Tensor, _Entry] = WeakTensorKeyDictionary()

    def get(self, b: Tensor, b_scales: Tensor) -> Tensor:
        """b as bf16 [G, N, K]; computed again when b or b_scales was written to or exchanged."""
        if b.is_inference() or b_scales.is_inference():
            return dequantize_blocks(b, b_scales, torch.bfloat16)  # such tensors count no versions
        versions = (b._version, b_scales._version)
        entry = self._entries.get(b)
        if entry is not None and entry[0]() is b_scales and entry[1] == versions:
            return entry[2]
        weights = dequantize_blocks(b, b_scales, torch.bfloat16)
        self._entries[b] = (weakref.ref(b_scales), versions, weights)
        return weights
