"""What callers pass: NumPy arrays and torch tensors, checked, and as bytes.

torch is never imported here: if it has not been imported, no value can be a tensor of it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from expertd_client.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", "npt.NDArray[Any]", "torch.Tensor")
"""NumPy arrays or torch tensors: outputs are of the same kind as inputs."""

FLOATS = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
"""dtype -> the protocol's datatype of hidden states."""
INTEGERS = {"int32": "INT32", "int64": "INT64"}
ITEM_BYTES = {"FP32": 4, "FP16": 2, "BF16": 2, "INT32": 4, "INT64": 8}
_BITS = "uint16"  # NumPy has no bfloat16: its bits


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input [rows, columns]; `value` is the caller's array or tensor."""

    name: str
    datatype: str
    shape: tuple[int, int]
    value: Any

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return self.shape[0] * self.shape[1] * ITEM_BYTES[self.datatype]

    def rows(self, start: int, stop: int) -> "Tensor":
        """Some of its rows."""
        return Tensor(self.name, self.datatype, (stop - start, self.shape[1]), self.value[start:stop])

    def view(self) -> memoryview:
        """Its values in host memory, row-major: of the caller's own memory, if that is contiguous."""
        if isinstance(self.value, np.ndarray):
            return bytes_of(np.ascontiguousarray(self.value))
        return bytes_of_torch(_on_host(self.value.detach()).contiguous())


def read(name: str, value: Any, dtypes: dict[str, str]) -> Tensor:
    """`value` as an input with one of `dtypes` (name -> datatype). Raises InvalidRequestError."""
    if not isinstance(value, np.ndarray) and not is_torch(value):
        got = type(value).__name__
        raise InvalidRequestError(f"{name}: expected a NumPy array or a torch tensor, got {got}")
    check_dense(name, value)
    shape = tuple(value.shape)
    if len(shape) != 2:
        raise InvalidRequestError(f"shape of {name}: expected [tokens, columns], got {list(shape)}")
    dtype = dtype_of(value)
    datatype = dtypes.get(dtype)
    if dtype == _BITS and isinstance(value, np.ndarray):
        datatype = dtypes.get("bfloat16")
    if datatype is None:
        raise InvalidRequestError(f"dtype of {name}: expected {_any_of(dtypes)}, got {dtype}")
    return Tensor(name, datatype, (int(shape[0]), int(shape[1])), value)


def check_dense(name: str, value: Any) -> None:
    """Raise InvalidRequestError for torch tensors that are sparse or have no memory."""
    if is_torch(value) and (value.is_meta or str(value.layout) != "torch.strided"):
        got = f"{value.layout} on {value.device}"
        raise InvalidRequestError(f"{name}: expected torch.strided with memory, got {got}")


def is_torch(value: object) -> bool:
    """Whether it is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dtype_of(value: Any) -> str:
    """The name of an array's or a tensor's dtype, such as float32; of foreign byte order, such as >f4."""
    if isinstance(value, np.ndarray):
        return numpy_name(value.dtype)
    return str(value.dtype).removeprefix("torch.")


@lru_cache(maxsize=64)  # NumPy needs 3 us to make up a name
def numpy_name(dtype: "np.dtype[Any]") -> str:
    """The name of a dtype; of foreign byte order, such as >f4."""
    name: str = dtype.name if dtype.isnative else dtype.str
    return name


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The memory of a contiguous array."""
    return array.view(np.uint8).reshape(-1).data


def bytes_of_torch(tensor: "torch.Tensor") -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import torch

    return bytes_of(tensor.view(torch.uint8).numpy())


def host_tensor(shape: Sequence[int], dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
    """Host memory for copies from or to `device`."""
    import torch

    # torch keeps pinned memory for the next call. Pageable memory costs a further copy in the driver.
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def _on_host(tensor: "torch.Tensor") -> "torch.Tensor":
    if tensor.device.type == "cpu":
        return tensor
    return host_tensor(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def _any_of(names: dict[str, str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
