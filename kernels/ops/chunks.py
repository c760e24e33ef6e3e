"""Splits element-wise work over rows into chunks that fit a CPU's caches."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Processing whole activations takes two to three times as long: every temporary is new memory to page in.
CHUNK_ELEMENTS = 1 << 20


def row_chunks(*tensors: Tensor, elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, split along their first dimension into matching chunks; on a GPU, one chunk with all rows.

    The tensors have the same first dimension. A chunk holds about `elements` elements of the first tensor.
    """
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= elements:
        return iter((tensors,))
    rows = max(1, elements * first.shape[0] // first.numel())
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
