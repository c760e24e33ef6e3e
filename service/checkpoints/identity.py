"""The identity of a layer's weights: a hash over the tensors of its routed experts, as the files have them.

docs/checkpoints.md says of which bytes, so that callers can compare it with the files that they have.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

from expertd.service.checkpoints.files import TensorFiles
from expertd.service.moe.tensor_file import TensorEntry, TensorFile

_MAX_WHOLE = 64 * 1024  # bytes of a matrix that are all read: scales of blocks are fewer
_PIECE = 1024  # bytes at the begin and at the end of a larger one; twice as many in the middle
_OF_ROUTER = ("router", "router_bias", "shared_gate")  # in a weights file
_ROUTER_BIAS = "e_score_correction_bias"  # some families have it among the experts

_Tensor = tuple[str, TensorFile, TensorEntry]


def checkpoint_id(files: TensorFiles, start: str) -> str:
    """That of the layer whose names begin with `start`; reads a few MB. Raises CheckpointError."""
    names = sorted(files.under(start))
    found = [(name.removeprefix(start), *files.entry(name)) for name in names if _is_of_expert(name, start)]
    if not found:  # some families have all experts in tensors beside the router
        others = [(name.removeprefix(start), *files.entry(name)) for name in names]
        found = [tensor for tensor in others if len(tensor[2].shape) > 2]
    return _digest(found)


def file_id(path: Path) -> str:
    """The weights_id of the layer in a weights file. Raises TensorFileError."""
    with TensorFile(path) as file:
        names = sorted(file.tensors.keys() - set(_OF_ROUTER))
        return _digest((name, file, file.tensors[name]) for name in names)


def random_id(*sizes: int) -> str:
    """That of random weights, which their seed and the layer's sizes determine."""
    return sha256(f"random {' '.join(map(str, sizes))}\n".encode()).hexdigest()


def _is_of_expert(name: str, start: str) -> bool:
    parts = name.removeprefix(start).split(".")
    return "experts" in parts and parts[-1] != _ROUTER_BIAS


def _digest(tensors: Iterable[_Tensor]) -> str:
    digest = sha256()
    for name, file, entry in tensors:
        digest.update(f"{name} {entry.dtype} {','.join(map(str, entry.shape))}\n".encode())
        for start, num_bytes in _pieces(entry):
            piece = bytearray(num_bytes)
            file.read(entry, memoryview(piece), start)
            digest.update(piece)
    return digest.hexdigest()


def _pieces(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """The bytes that count, as starts and lengths: of each matrix, if a tensor has several."""
    count = entry.shape[0] if len(entry.shape) > 2 else 1
    size = entry.num_bytes // count if count else 0
    for start in range(0, count * size, size or 1):
        if size <= _MAX_WHOLE:
            yield start, size
        else:
            yield start, _PIECE
            yield start + size // 2 - _PIECE, 2 * _PIECE
            yield start + size - _PIECE, _PIECE
