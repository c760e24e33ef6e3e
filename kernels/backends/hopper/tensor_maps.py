"""Tensor maps, which describe tensors to TMA, cached for as long as their tensors live."""

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from expertd.kernels.backends.hopper.parameters import TensorMapWords
from expertd.kernels.backends.streams import cuda_core

_BOX_BYTES = 128  # of a row, as wide as the swizzle
_BYTES = ctypes.POINTER(ctypes.c_char * ctypes.sizeof(TensorMapWords))


class Rows:
    """Contiguous data [.., K] as rows of K unsigned integers of its width, in a form that cuda.core reads.

    It keeps the memory alive but not the tensor; a view would keep its base tensor alive.
    """

    def __init__(self, data: Tensor) -> None:
        k = data.shape[-1]
        self.itemsize = data.itemsize
        self._memory = data.untyped_storage()
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (data.numel() // k, k),
            "typestr": f"<u{data.itemsize}",
            "data": (data.data_ptr(), False),
        }


class TensorMapCache:
    """Caches the results of `make(rows, box_rows)` by tensor, until the caller's tensor is freed.

    A tensor map keeps its memory alive, so an entry never describes memory that has been reused; and entries
    must not outlive their tensors, or a server would keep the activations of every step.
    """

    def __init__(self, make: Callable[[Rows, int], Any]) -> None:
        self._make = make
        self._made: dict[tuple[object, ...], tuple[Any, weakref.ref[Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, data: Tensor, box_rows: int) -> Any:
        """The tensor map of contiguous data [.., K], seen as rows of K."""
        key = (data.data_ptr(), data.shape, data.dtype, box_rows)
        entry = self._made.get(key)
        if entry is None:
            end = weakref.ref(data, lambda _: self._made.pop(key, None))
            entry = self._made[key] = (self._make(Rows(data), box_rows), end)
        return entry[0]


def describe_rows(rows: Rows, box_rows: int, l2_promotion: bool = True) -> Any:
    """The tensor map of rows, which TMA copies in boxes of box_rows x 128 bytes."""
    view = cuda_core().utils.StridedMemoryView.from_cuda_array_interface(rows, stream_ptr=-1)
    return view.as_tensor_map(options=_options(box_rows, _BOX_BYTES // rows.itemsize, l2_promotion))


class PackedTensorMap(NamedTuple):
    """A tensor map, and its bytes for a struct; the bytes alone would not keep the memory alive."""

    described: Any
    packed: bytes


def pack_rows(rows: Rows, box_rows: int, l2_promotion: bool = True) -> PackedTensorMap:
    """`describe_rows` for a struct of parameters."""
    described = describe_rows(rows, box_rows, l2_promotion)
    holder = _param_holder()((described,))  # at `ptr` is a pointer to each argument
    return PackedTensorMap(described, _BYTES.from_address(holder.ptr).contents.raw)


@functools.cache
def _param_holder() -> Any:
    from cuda.core._kernel_arg_handler import ParamHolder  # nothing public has a tensor map's bytes

    return ParamHolder


@functools.cache
def _options(rows: int, columns: int, l2_promotion: bool) -> Any:
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle  # exported nowhere else

    return cuda_core().TensorMapDescriptorOptions(
        (rows, columns),
        swizzle=TensorMapSwizzle.SWIZZLE_128B,
        l2_promotion=TensorMapL2Promotion.L2_256B if l2_promotion else TensorMapL2Promotion.NONE,
    )
