"""Weights as they are multiplied, kept for as long as the caller's tensors live."""

import weakref
from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from expertd.kernels.backends.reference.matrices import Matrices, matrices_of
from expertd.kernels.ops.quantize import Quantized


class _Entry(NamedTuple):
    scales: "weakref.ref[Tensor]"
    versions: tuple[int, int]
    matrices: Matrices


class WeightCache:
    """Weights by the identity of the caller's tensors, dropped when those are freed."""

    def __init__(self) -> None:
        self._entries: MutableMapping[Tensor, _Entry] = WeakTensorKeyDictionary()

    def packed(self, weights: Quantized) -> Quantized:
        """Weights whose data is only the key of their matrices: of the same shape, on the meta device."""
        data = torch.empty_like(weights.data, device="meta")
        self._entries[data] = _Entry(weakref.ref(weights.scales), (0, 0), self.get(*weights))
        return Quantized(data, weights.scales)

    def get(self, b: Tensor, b_scales: Tensor) -> Matrices:
        """A matrix for each group of b, recomputed if b or b_scales has been modified or replaced."""
        entry = self._entries.get(b)
        if b.is_meta:
            if entry is None:
                raise ValueError("weights device: expected cpu, or those of `packed`, got meta")
            return entry.matrices
        if b.is_inference() or b_scales.is_inference():
            return matrices_of(b, b_scales)  # inference tensors have no version counter
        versions = (b._version, b_scales._version)
        if entry is not None and entry.scales() is b_scales and entry.versions == versions:
            return entry.matrices
        matrices = matrices_of(b, b_scales)
        self._entries[b] = _Entry(weakref.ref(b_scales), versions, matrices)
        return matrices

    def refresh(
        self, b: Tensor, b_scales: Tensor, groups: Sequence[int], replacements: Sequence[Tensor]
    ) -> None:
        """Take these matrices for groups that have changed, after changes to no others."""
        entry = self._entries.get(b)
        if entry is None or entry.scales() is not b_scales:
            return
        matrices = list(entry.matrices)
        for group, matrix in zip(groups, replacements, strict=True):
            matrices[group] = matrix
        self._entries[b] = _Entry(entry.scales, (b._version, b_scales._version), tuple(matrices))
