"""TMA descriptors kept for as long as the tensors that they describe."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DescriptorCache:
    """What `make(rows of bytes [R, K], box_rows)` gave for a tensor, until the caller's tensor goes.

    A descriptor holds on to its memory, so that an entry can never describe memory that is somebody else's by
    now; and it must not outlive the tensor, or a server would keep the activations of every step.
    """

    def __init__(self, make: Callable[[Tensor, int], Any]) -> None:
        self._make = make
        self._made: dict[tuple[int, int, int, int], Any] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, data: Tensor, box_rows: int) -> Any:
        """The descriptor of contiguous e4m3 data [.., K], seen as rows of K bytes."""
        k = data.shape[-1] * data.element_size()
        rows = data.numel() // data.shape[-1]
        key = (data.data_ptr(), rows, k, box_rows)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(_bytes(data, rows, k), box_rows)
            weakref.finalize(data, self._made.pop, key, None).atexit = False
        return made


def _bytes(data: Tensor, rows: int, k: int) -> Tensor:
    # Not a view: a view keeps the tensor that it is of, and with it this entry.
    alias = torch.empty(0, dtype=torch.uint8, device=data.device)
    return alias.set_(data.untyped_storage(), data.storage_offset() * data.element_size(), (rows, k), (k, 1))
