"""Finds tensors in the safetensors files of a directory, and reads their headers."""

import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from expertd.service.checkpoints.config import CheckpointError, read_json_object
from expertd.service.moe.tensor_file import TensorEntry, TensorFile, TensorFileError
from expertd.service.util.files import why_unreadable
from expertd.service.util.sentences import shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


ORIGINAL = "serve the checkpoint that it was made from"


def gguf_files(directory: Path) -> list[Path]:
    """The files of llama.cpp's format in a directory, or one level below."""
    return sorted(file for pattern in ("*.gguf", "*/*.gguf") for file in directory.glob(pattern))


def hint_of(directory: Path) -> str | None:
    """What was expected instead of `directory`, if that is recognized; None: nothing is wrong so far."""
    if not directory.is_absolute() and _HUB_ID.fullmatch(str(directory)) and not directory.exists():
        return (
            f"expected a directory with a checkpoint, got none with that name; for a model "
            f"on the Hugging Face hub: hf download {directory} --local-dir {directory}"
        )
    try:
        if (directory / "config.json").exists():
            return None
        if found := [directory] if directory.suffix == ".gguf" else gguf_files(directory):
            return f"expected config.json and safetensors files, got GGUF ({found[0].name}); {ORIGINAL}"
        snapshots = sorted(directory.glob("snapshots/*/config.json"))
    except OSError:
        return None  # whoever reads config.json says so
    if not snapshots:
        return None
    return f"expected a snapshot in the hub's cache, got the model's directory; try {snapshots[-1].parent}"


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its safetensors dtype ("BF16", "F8_E4M3", ...) and shape."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class OpenFiles:
    """Safetensors files by path, opened on first use, by any thread, and closed together."""

    def __init__(self) -> None:
        self._files: dict[Path, TensorFile] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __iter__(self) -> Iterator[Path]:
        """The files that have been opened."""
        return iter(self._files)

    def __getitem__(self, path: Path) -> TensorFile:
        """The file at `path`. Raises CheckpointError if it cannot be read or is truncated."""
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = TensorFile(path)
                except TensorFileError as error:
                    raise CheckpointError(str(error)) from error
            return self._files[path]


class TensorFiles:
    """The safetensors files of `directory`: one, or several with an index. Raises CheckpointError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open = OpenFiles()
        self._sorted: dict[Path, list[str]] = {}  # the names in each opened file

    def find(self, name: str) -> Stored:
        """Find a tensor. Raises CheckpointError, with its name, if it is missing."""
        file, tensor = self.entry(name)
        return Stored(file.path, name, tensor.dtype, tensor.shape)

    def entry(self, name: str) -> tuple[TensorFile, TensorEntry]:
        """A tensor's place, for as long as the files are open. Raises as `find`."""
        file = self._open[self._path(name)]
        tensor = file.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{file.path}: expected tensor {name}, got none with that name")
        return file, tensor

    def has(self, name: str) -> bool:
        """Whether the index, or the single file, has a tensor `name`. Raises CheckpointError."""
        return name in (self._open[self._single].tensors if self._index is None else self._index)

    def under(self, prefix: str) -> set[str]:
        """The names that begin with `prefix`: in the index or the single file, and in files that are open."""
        listed = [self._names(path) for path in list(self._open)]
        listed.append(self._names(self._single) if self._index is None else self._in_index)
        return {name for names in listed for name in _beginning(names, prefix)}

    def _names(self, path: Path) -> list[str]:
        """The names in the file at `path`, sorted."""
        if path not in self._sorted:
            self._sorted[path] = sorted(self._open[path].tensors)
        return self._sorted[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def _path(self, name: str) -> Path:
        if self._index is None:
            return self._single
        index, file = self.directory / INDEX, self._index.get(name)
        if file is None:
            raise CheckpointError(f"{index}: expected tensor {name}, got none with that name")
        # A link in the directory may point elsewhere (the hub's cache consists of them); a path may not.
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointError(
                f"{index}: {name}: expected a .safetensors file in the same directory, got {file!a:.80}"
            )
        return self.directory / file

    @cached_property
    def _index(self) -> Mapping[str, Any] | None:
        path = self.directory / INDEX
        if not _exists(path):
            return None
        weight_map = read_json_object(path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{path}: weight_map: expected an object, got {shown(weight_map)}")
        return weight_map

    @cached_property
    def _in_index(self) -> list[str]:
        return sorted(self._index or ())

    @cached_property
    def _single(self) -> Path:
        path = self.directory / SINGLE
        if not _exists(path):
            pickles = sorted(file.name for pattern in _PICKLES for file in self.directory.glob(pattern))
            got = f"pickles, which are never loaded ({pickles[0]})" if pickles else "neither"
            if found := gguf_files(self.directory):
                got = f"GGUF ({found[0].name}); {ORIGINAL}"
            raise CheckpointError(f"{self.directory}: expected {INDEX} or {SINGLE}, got {got}")
        return path


def _beginning(names: list[str], prefix: str) -> Iterator[str]:
    for name in names[bisect_left(names, prefix) :]:
        if not name.startswith(prefix):
            return
        yield name


def _exists(path: Path) -> bool:
    """Whether `path` exists; a dangling link counts."""
    try:
        return path.is_symlink() or path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: {why_unreadable(path, error)}") from error
