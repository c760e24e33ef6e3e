"""A safetensors file, read with pread. Nothing is mapped: a file that shrinks is an error, not a signal.

Does not import torch.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeGuard

from expertd.service.util.files import check_readable, why_unreadable

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8  # of the header's length, in front of it
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorFileError(ValueError):
    """A file cannot be read, is none of safetensors, or has changed; the text names it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's safetensors dtype ("BF16", "F8_E4M3", ...), its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class TensorFile:
    """The open file at `path`; `tensors` are those in its header, by name.

    Raises TensorFileError unless it is a whole safetensors file, of which the tensors' bytes are the rest
    behind the header, without gaps.
    """

    def __init__(self, path: Path) -> None:
        try:
            check_readable(path)
        except ValueError as error:
            raise TensorFileError(str(error)) from error
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TensorFileError(f"{path}: {why_unreadable(path, error)}") from error
        try:
            self._num_bytes = os.fstat(self._descriptor).st_size
            self.tensors: Mapping[str, TensorEntry] = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, tensor: TensorEntry, into: memoryview, start: int = 0) -> None:
        """Fill `into`, of bytes, with those of `tensor` from `start` on.

        Raises TensorFileError if the file is shorter than it was, or cannot be read any more.
        """
        if start < 0 or start + len(into) > tensor.num_bytes:
            raise IndexError(
                f"bytes of the tensor: expected at most {tensor.num_bytes}, got {start} and more"
            )
        self._read(into, tensor.start + start)

    def _read(self, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done:]], offset + done)
            except OSError as error:
                raise TensorFileError(f"{self.path}: {why_unreadable(self.path, error)}") from error
            if not count:
                now = os.fstat(self._descriptor).st_size
                raise TensorFileError(
                    f"{self.path}: expected {self._num_bytes} bytes, as when it was opened, got {now}"
                )
            done += count

    def _read_header(self) -> dict[str, TensorEntry]:
        if self._num_bytes < _LENGTH_BYTES:
            self._refuse(f"{self._num_bytes} bytes")
        length = int.from_bytes(self._bytes(0, _LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + length
        if length > _MAX_HEADER_BYTES or begin > self._num_bytes:
            self._refuse(f"a header of {length} bytes in a file of {self._num_bytes}")
        try:
            header = json.loads(self._bytes(_LENGTH_BYTES, length))
        except (ValueError, RecursionError):
            self._refuse("a header that is not JSON")
        if not isinstance(header, dict):
            self._refuse("a header that is not a JSON object")
        header.pop("__metadata__", None)
        tensors = {name: self._entry(name, value, begin) for name, value in header.items()}
        self._check_places(tensors, begin)
        return tensors

    def _bytes(self, offset: int, count: int) -> bytearray:
        got = bytearray(count)
        self._read(memoryview(got), offset)
        return got

    def _entry(self, name: str, value: Any, begin: int) -> TensorEntry:
        value = value if isinstance(value, dict) else {}
        dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
            self._refuse(f"no dtype, shape and data_offsets of tensor {name!a:.200}")
        first, last = offsets
        bits = _BITS.get(dtype)
        if bits is not None and math.prod(shape) * bits != 8 * (last - first):
            self._refuse(f"{last - first} bytes for shape {shape} of {dtype} of tensor {name!a:.200}")
        return TensorEntry(dtype, tuple(shape), begin + first, last - first)

    def _check_places(self, tensors: Mapping[str, TensorEntry], begin: int) -> None:
        end = begin
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if tensor.start != end or tensor.num_bytes < 0:
                self._refuse(f"tensor {name!a:.200} at byte {tensor.start} instead of {end}")
            end += tensor.num_bytes
        if end != self._num_bytes:
            self._refuse(f"{self._num_bytes} bytes instead of {end}")

    def _refuse(self, got: str) -> NoReturn:
        raise TensorFileError(f"{self.path}: expected a safetensors file, got: {got}")


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
