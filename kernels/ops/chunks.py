"""Splits element-wise work over rows into pieces that stay in a CPU's caches."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Whole activations at once cost two to three times as much: every temporary is fresh memory to page in.
_CHUNK_ELEMENTS = 1 << 20


def row_chunks(*tensors: Tensor, elements: int = _CHUNK_ELEMENTS) -> Iterator[tuple[Tensor, ...]]:
    """The tensors cut alike along their first dimension, all rows at once on a GPU.

    The tensors agree in that dimension; a piece has as many rows as make `elements` of the first one.
    """
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= elements:
        return iter((tensors,))
    rows = max(1, elements * first.shape[0] // first.numel())
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
