"""Where an output is written: new memory of the input's kind, or the caller's `out`."""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from expertd_client.arrays import (
    FLOATS,
    Tensor,
    bytes_of,
    bytes_of_torch,
    check_dense,
    dtype_of,
    host_tensor,
    is_torch,
    numpy_name,
)
from expertd_client.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

_ALIASES = {**{datatype: name for name, datatype in FLOATS.items()}, **{name: name for name in FLOATS}}
_DATATYPES = {**FLOATS, "uint16": "BF16"}
_EXPECTED = "float32, float16 or bfloat16"


class Output(Protocol):
    """A call's output [tokens, hidden_size] of `datatype`, written by one of its methods."""

    datatype: str

    def memory(self) -> memoryview:
        """The host memory that the output's bytes are to be written to, row-major."""

    def store(self, data: "npt.NDArray[np.uint8]") -> None:
        """Copy the output's bytes, row-major, from host memory."""

    def result(self) -> Any:
        """The output as the caller's kind of array, once its bytes are written."""

    def rows(self, start: int, stop: int) -> "Output":
        """The output of some of the tokens, complete with its `result`."""


class NumpyOutput:
    """A NumPy array; bfloat16 is ml_dtypes' or, as bits, uint16."""

    def __init__(self, shape: tuple[int, int], dtype: "np.dtype[Any]", out: npt.NDArray[Any] | None) -> None:
        self.datatype = _DATATYPES[numpy_name(dtype)]
        self._array = np.empty(shape, dtype) if out is None else out

    def memory(self) -> memoryview:
        """The memory of the array itself."""
        return bytes_of(self._array)

    def store(self, data: "npt.NDArray[np.uint8]") -> None:
        """Into the array itself."""
        np.copyto(self._array.view(np.uint8).reshape(-1), data)

    def result(self) -> npt.NDArray[Any]:
        """The array."""
        return self._array

    def rows(self, start: int, stop: int) -> "NumpyOutput":
        """These rows of the array itself."""
        part = self._array[start:stop]
        return NumpyOutput(part.shape, part.dtype, part)


class TorchOutput:
    """A torch tensor on the device of `like`, or `out` on its own."""

    def __init__(self, like: "torch.Tensor", dtype: "torch.dtype", out: "torch.Tensor | None") -> None:
        self.datatype = FLOATS[str(dtype).removeprefix("torch.")]
        self._result = out
        self._shape, self._dtype = like.shape, dtype
        self._device = like.device if out is None else out.device
        self._host: torch.Tensor | None = None

    def memory(self) -> memoryview:
        """Of the tensor itself on a CPU; else of pinned memory, from which `result` copies it."""
        if self._device.type == "cpu":
            return bytes_of_torch(self.tensor())
        self._host = host_tensor(self._shape, self._dtype, self._device)
        return bytes_of_torch(self._host)

    def store(self, data: "npt.NDArray[np.uint8]") -> None:
        """Into the tensor itself."""
        import torch

        self.tensor().copy_(torch.from_numpy(data).view(self._dtype).view(self._shape))

    def tensor(self) -> "torch.Tensor":
        """The tensor that `result` returns, on its device, to be written there."""
        import torch

        if self._result is None:
            self._result = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._result.detach()

    def result(self) -> "torch.Tensor":
        """The tensor on its device."""
        if self._host is not None:
            if self._result is None:
                return self._host.to(self._device)
            self._result.detach().copy_(self._host)
        elif self._result is None:
            self.tensor()
        assert self._result is not None
        return self._result

    def rows(self, start: int, stop: int) -> "TorchOutput":
        """These rows of the tensor itself."""
        part = self.tensor()[start:stop]
        return TorchOutput(part, self._dtype, part)


def make_output(hidden_states: Tensor, output_dtype: object, out: object) -> Output:
    """The output of `hidden_states`; `output_dtype` None: of their dtype, or of `out`'s.

    Raises InvalidRequestError.
    """
    given = hidden_states.value
    name = None if output_dtype is None else _name_of(output_dtype)
    if out is not None:
        _check_out(out, given, hidden_states.shape)
        if name is not None and _DATATYPES[name] != _DATATYPES[dtype_of(out)]:
            raise InvalidRequestError(f"dtype of out: expected output_dtype's, {name}, got {dtype_of(out)}")
        name = dtype_of(out)
    if isinstance(given, np.ndarray):
        dtype = given.dtype if name is None else _numpy_dtype(name, given.dtype)
        return NumpyOutput(hidden_states.shape, dtype, out if isinstance(out, np.ndarray) else None)
    import torch

    if name == "uint16":
        raise InvalidRequestError(f"output_dtype: expected {_EXPECTED} with torch tensors, got uint16")
    dtype = given.dtype if name is None else getattr(torch, name)
    return TorchOutput(given, dtype, out if isinstance(out, torch.Tensor) else None)


def _name_of(dtype: object) -> str:
    """float32, float16, bfloat16 or uint16, from a name (of the protocol too) or a dtype."""
    name = _ALIASES.get(dtype) or _ALIASES.get(dtype.upper()) if isinstance(dtype, str) else None
    if name is None and type(dtype).__module__ == "torch":
        name = _ALIASES.get(str(dtype).removeprefix("torch."))
    elif name is None:
        try:
            found = np.dtype(dtype).name  # type: ignore[call-overload]
        except TypeError:
            found = ""
        name = "uint16" if found == "uint16" else _ALIASES.get(found)
    if name is None:
        raise InvalidRequestError(f"output_dtype: expected {_EXPECTED}, got {dtype}")
    return name


def _numpy_dtype(name: str, given: "np.dtype[Any]") -> "np.dtype[Any]":
    if name != "bfloat16":
        return np.dtype(name)
    if numpy_name(given) in ("bfloat16", "uint16"):
        return given
    try:
        import ml_dtypes
    except ImportError:
        text = "output_dtype: expected uint16 (the bits) where ml_dtypes is not installed, got bfloat16"
        raise InvalidRequestError(text) from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def _check_out(out: Any, given: object, shape: tuple[int, int]) -> None:
    numpy = isinstance(given, np.ndarray)
    if not (isinstance(out, np.ndarray) if numpy else is_torch(out)):
        kind = "a NumPy array" if numpy else "a torch tensor"
        raise InvalidRequestError(f"out: expected {kind} like hidden_states, got {type(out).__name__}")
    check_dense("out", out)
    if tuple(out.shape) != shape:
        raise InvalidRequestError(f"shape of out: expected {list(shape)}, got {list(out.shape)}")
    if dtype_of(out) not in FLOATS and not (numpy and dtype_of(out) == "uint16"):
        raise InvalidRequestError(f"dtype of out: expected {_EXPECTED}, got {dtype_of(out)}")
    if not (out.flags.c_contiguous and out.flags.writeable if numpy else out.is_contiguous()):
        raise InvalidRequestError("out: expected writable contiguous memory, got a view or read-only memory")
