"""The identity of a layer's weights, from a checkpoint's files: equal to that of a server that serves them.

A SHA-256 over the tensors of the layer's routed experts as the files have them, by name: a line with the name
behind the layer's number, dtype and shape, then bytes of each matrix: all up to 64 KiB, of larger ones 1 KiB
at the begin and at the end and 2 KiB in the middle. So routers, shared experts, the number of files and what
stands before `layers` do not count.
"""

import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PREFIXES = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "model.language_model.model.layers.",
    "thinker.model.layers.",
    "layers.",
)
_ROUTER_BIAS = "e_score_correction_bias"  # some families have it among the experts
_MAX_WHOLE = 64 * 1024
_PIECE = 1024
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class _TensorEntry(NamedTuple):
    """A tensor: its bytes in the file are those from `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weights_id(directory: "str | os.PathLike[str]", layer: int) -> str:
    """That of a MoE layer of the safetensors checkpoint in `directory`, as in ModelMetadata; reads a few MB.

    Raises ValueError if there is no such layer, or a file is none of safetensors; OSError.
    """
    files = _files(Path(directory))
    for prefix in _PREFIXES:
        start = f"{prefix}{layer}."
        names = sorted(name for name in files if name.startswith(start))
        found = [name for name in names if _is_of_expert(name.removeprefix(start))]
        if not found:  # some families have all experts in tensors beside the router
            found = [name for name in names if len(_entry(files, name).shape) > 2]
        if found:
            return _digest(files, start, found)
    raise ValueError(f"{directory}: layer {layer}: expected experts' tensors, got none")


def _is_of_expert(name: str) -> bool:
    parts = name.split(".")
    return "experts" in parts and parts[-1] != _ROUTER_BIAS


def _digest(files: Mapping[str, Path], start: str, names: list[str]) -> str:
    digest = sha256()
    opened: dict[Path, BinaryIO] = {}
    try:
        for name in names:
            path, entry = files[name], _entry(files, name)
            if path not in opened:
                opened[path] = path.open("rb")
            shape = ",".join(map(str, entry.shape))
            digest.update(f"{name.removeprefix(start)} {entry.dtype} {shape}\n".encode())
            for begin, count in _pieces(entry):
                opened[path].seek(begin)
                digest.update(_read(opened[path], count))
    finally:
        for file in opened.values():
            file.close()
    return digest.hexdigest()


def _pieces(entry: _TensorEntry) -> Iterator[tuple[int, int]]:
    """Places and lengths of the bytes that count in the file: of each matrix, if a tensor has several."""
    count = entry.shape[0] if len(entry.shape) > 2 else 1
    size = (entry.end - entry.begin) // count if count else 0
    for first in range(entry.begin, entry.begin + count * size, size or 1):
        if size <= _MAX_WHOLE:
            yield first, size
        else:
            yield first, _PIECE
            yield first + size // 2 - _PIECE, 2 * _PIECE
            yield first + size - _PIECE, _PIECE


def _files(directory: Path) -> Mapping[str, Path]:
    """The file of each tensor, by name."""
    index = directory / _INDEX
    if not index.exists():
        single = directory / _SINGLE
        return dict.fromkeys(_header(single, single.stat().st_mtime_ns), single)
    names = _weight_map(index, index.stat().st_mtime_ns)
    return {name: directory / Path(file).name for name, file in names.items()}


def _entry(files: Mapping[str, Path], name: str) -> _TensorEntry:
    path = files[name]
    found = _header(path, path.stat().st_mtime_ns).get(name)
    if found is None:
        raise ValueError(f"{path}: expected tensor {name}, got none with that name")
    return found


@lru_cache(maxsize=4)  # all layers of a model are asked for in turn
def _weight_map(path: Path, changed: int) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_bytes())["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON with a weight_map, got {error!r:.100}") from error


@lru_cache(maxsize=4)
def _header(path: Path, changed: int) -> dict[str, _TensorEntry]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(_read(file, 8), "little")
            header = json.loads(_read(file, min(length, _MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        return {
            name: _TensorEntry(
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                *(8 + length + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a safetensors file, got {error!r:.100}") from error


def _read(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError(f"{file.name}: expected {count} more bytes, got {len(data)}")
    return data
