"""TMA descriptors kept for as long as the tensors that they describe."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Rows:
    """Contiguous data [.., K] as rows of K unsigned numbers of its width, in a form that cuda.core reads.

    It keeps the memory and not the tensor; a view would keep the tensor that it is of.
    """

    def __init__(self, data: Tensor) -> None:
        k = data.shape[-1]
        self.itemsize = data.itemsize
        self._memory = data.untyped_storage()
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (data.numel() // k, k),
            "typestr": f"<u{data.itemsize}",
            "data": (data.data_ptr(), False),
        }


class DescriptorCache:
    """What `make(rows, box_rows)` gave for a tensor, until the caller's tensor goes.

    A descriptor holds on to its memory, so that an entry can never describe memory that is somebody else's by
    now; and it must not outlive the tensor, or a server would keep the activations of every step.
    """

    def __init__(self, make: Callable[[Rows, int], Any]) -> None:
        self._make = make
        self._made: dict[tuple[object, ...], tuple[Any, weakref.ref[Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, data: Tensor, box_rows: int) -> Any:
        """The descriptor of contiguous data [.., K], seen as rows of K."""
        key = (data.data_ptr(), data.shape, data.dtype, box_rows)
        entry = self._made.get(key)
        if entry is None:
            end = weakref.ref(data, lambda _: self._made.pop(key, None))
            entry = self._made[key] = (self._make(Rows(data), box_rows), end)
        return entry[0]
