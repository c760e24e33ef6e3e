"""Weights as a backend multiplies them, kept for as long as the caller's tensors live."""

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from expertd.kernels.ops.four_bits import W, Weights, tensors_of, with_data

M = TypeVar("M")


class _Entry(NamedTuple, Generic[M]):
    scales: tuple["weakref.ref[Tensor]", ...]
    versions: tuple[int, ...]
    matrices: tuple[M, ...]


class WeightCache(Generic[M]):
    """Weights by the identity of the caller's tensors, dropped when those are freed.

    prepare  makes the matrix of each group of weights [G, N, K]
    """

    def __init__(self, prepare: Callable[[Weights], tuple[M, ...]]) -> None:
        self._prepare = prepare
        self._entries: MutableMapping[Tensor, _Entry[M]] = WeakTensorKeyDictionary()

    def packed(self, weights: W) -> W:
        """Weights whose data is only the key of their matrices: of the same shape, on the meta device."""
        made = with_data(weights, torch.empty_like(weights.data, device="meta"))
        self.keep(made, self.get(weights))
        return made

    def keep(self, weights: Weights, matrices: tuple[M, ...]) -> None:
        """Have these matrices for weights whose data is on the meta device."""
        self._entries[weights.data] = _Entry(_weak(weights), (), matrices)

    def get(self, weights: Weights) -> tuple[M, ...]:
        """A matrix for each group, recomputed if a tensor of the weights has been modified or replaced."""
        entry = self._entries.get(weights.data)
        if weights.data.is_meta:
            if entry is None:
                raise ValueError("weights device: expected cpu, or those of `packed`, got meta")
            return entry.matrices
        if any(tensor.is_inference() for tensor in tensors_of(weights)):
            return self._prepare(weights)  # inference tensors have no version counter
        if entry is not None and _is_of(entry, weights) and entry.versions == _versions(weights):
            return entry.matrices
        versions = _versions(weights)
        matrices = self._prepare(weights)
        self._entries[weights.data] = _Entry(_weak(weights), versions, matrices)
        return matrices

    def kept(self, weights: Weights) -> tuple[M, ...]:
        """The matrices that it has of these weights, also if they have changed since; else none."""
        entry = self._entries.get(weights.data)
        return entry.matrices if entry is not None and _is_of(entry, weights) else ()

    def refresh(self, weights: Weights, groups: Sequence[int], replacements: Sequence[M]) -> None:
        """Take these matrices for groups that have changed, after changes to no others."""
        entry = self._entries.get(weights.data)
        if entry is None or not _is_of(entry, weights):
            return
        matrices = list(entry.matrices)
        for group, matrix in zip(groups, replacements, strict=True):
            matrices[group] = matrix
        versions = () if weights.data.is_meta else _versions(weights)
        self._entries[weights.data] = _Entry(entry.scales, versions, tuple(matrices))


def _weak(weights: Weights) -> tuple["weakref.ref[Tensor]", ...]:
    """What multiplies the data, which is a key by itself."""
    return tuple(weakref.ref(tensor) for tensor in tensors_of(weights)[1:])


def _is_of(entry: _Entry[M], weights: Weights) -> bool:
    scales = tensors_of(weights)[1:]
    return len(scales) == len(entry.scales) and all(
        kept() is given for kept, given in zip(entry.scales, scales, strict=True)
    )


def _versions(weights: Weights) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors_of(weights))
