"""Weights as a backend multiplies them, kept for as long as the caller's tensors live."""

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from expertd.kernels.ops.quantize import Quantized

M = TypeVar("M")


class _Entry(NamedTuple, Generic[M]):
    scales: "weakref.ref[Tensor]"
    versions: tuple[int, int]
    matrices: tuple[M, ...]


class WeightCache(Generic[M]):
    """Weights by the identity of the caller's tensors, dropped when those are freed.

    prepare  makes the matrix of each group of data [G, N, K] and scales
    """

    def __init__(self, prepare: Callable[[Tensor, Tensor], tuple[M, ...]]) -> None:
        self._prepare = prepare
        self._entries: MutableMapping[Tensor, _Entry[M]] = WeakTensorKeyDictionary()

    def packed(self, weights: Quantized) -> Quantized:
        """Weights whose data is only the key of their matrices: of the same shape, on the meta device."""
        data = torch.empty_like(weights.data, device="meta")
        self._entries[data] = _Entry(weakref.ref(weights.scales), (0, 0), self.get(*weights))
        return Quantized(data, weights.scales)

    def get(self, b: Tensor, b_scales: Tensor) -> tuple[M, ...]:
        """A matrix for each group of b, recomputed if b or b_scales has been modified or replaced."""
        entry = self._entries.get(b)
        if b.is_meta:
            if entry is None:
                raise ValueError("weights device: expected cpu, or those of `packed`, got meta")
            return entry.matrices
        if b.is_inference() or b_scales.is_inference():
            return self._prepare(b, b_scales)  # inference tensors have no version counter
        versions = (b._version, b_scales._version)
        if entry is not None and entry.scales() is b_scales and entry.versions == versions:
            return entry.matrices
        matrices = self._prepare(b, b_scales)
        self._entries[b] = _Entry(weakref.ref(b_scales), versions, matrices)
        return matrices

    def refresh(self, b: Tensor, b_scales: Tensor, groups: Sequence[int], replacements: Sequence[M]) -> None:
        """Take these matrices for groups that have changed, after changes to no others."""
        entry = self._entries.get(b)
        if entry is None or entry.scales() is not b_scales:
            return
        matrices = list(entry.matrices)
        for group, matrix in zip(groups, replacements, strict=True):
            matrices[group] = matrix
        self._entries[b] = _Entry(entry.scales, (b._version, b_scales._version), tuple(matrices))
