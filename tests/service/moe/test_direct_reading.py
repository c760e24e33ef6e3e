"""Large tensors are read around the page cache, unless that has them or the file system refuses."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from expertd.service.moe.tensor_file import DIRECT_ALIGNMENT, TensorFile, TensorFileError
from expertd.service.moe.tensor_reader import PIECE_BYTES, TensorReader

NUM_BYTES = 2 * PIECE_BYTES + 12345
START = PIECE_BYTES - 777
"""Of what is read to the end: parts of two pieces, and one whole."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    values = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8)
    save_file({"first": torch.ones(3), "values": values}, tmp_path / "tensors.safetensors")
    forget(tmp_path / "tensors.safetensors")
    return tmp_path / "tensors.safetensors"


def forget(path: Path) -> None:
    """Have the page cache drop a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from(path: Path, start: int) -> Tensor:
    """The file's last bytes: those of `values`, from `start` on."""
    return torch.frombuffer(bytearray(path.read_bytes()[start - NUM_BYTES :]), dtype=torch.uint8)


def read(path: Path, start: int = START, device: str = "cpu", **options: bool) -> Tensor:
    with TensorFile(path) as file, TensorReader() as reader:
        out = torch.empty(NUM_BYTES - start, dtype=torch.uint8, device=device)
        reader.read(file, file.tensors["values"], out, start, **options)
    return out.cpu()


@pytest.fixture
def direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read around the page cache that works; skips a test where none can."""
    with TensorFile(path) as file:
        if not file.can_read_direct or file.is_cached(file.tensors["values"], 0, NUM_BYTES):
            pytest.skip("the file system has no O_DIRECT, or does not forget files")
    counts: list[int] = []
    read_blocks = TensorFile._read_blocks

    def counting(file: TensorFile, *arguments: Any) -> int:
        if got := read_blocks(file, *arguments):
            counts.append(got)
        return got

    monkeypatch.setattr(TensorFile, "_read_blocks", counting)
    return counts


def test_a_file_that_is_not_cached_is_read_around_the_page_cache(path: Path, direct_reads: list[int]) -> None:
    got = read(path)
    assert 0 <= sum(direct_reads) - (NUM_BYTES - START) < DIRECT_ALIGNMENT, "and the first block's beginning"
    assert max(direct_reads) <= PIECE_BYTES
    with TensorFile(path) as file:
        places = range(0, NUM_BYTES - 4096, 65536)
        cached = sum(file.is_cached(file.tensors["values"], place, 4096) for place in places)
    assert cached < len(places) / 8, "reading has not filled the page cache"
    assert torch.equal(got, bytes_from(path, START))


def test_what_the_page_cache_has_comes_from_there(path: Path, direct_reads: list[int]) -> None:
    expected = bytes_from(path, 0)
    assert torch.equal(read(path, 0), expected)
    assert not direct_reads
    forget(path)
    assert torch.equal(read(path, 0, cached=True), expected)
    assert not direct_reads, "as asked for"


def _refuse_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def refusing(path: Path, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refusing)


def _refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.preadv

    def refusing(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refusing)


@pytest.mark.parametrize("refuse", [_refuse_to_open, _refuse_to_read])
def test_a_file_system_may_refuse(
    refuse: Callable[[pytest.MonkeyPatch], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        refuse(context)
        got = read(path)
    assert torch.equal(got, bytes_from(path, START))


@pytest.mark.parametrize("left", [0, 4096, PIECE_BYTES + 100, NUM_BYTES - 5000])
def test_a_file_that_shrinks_is_one_sentence(path: Path, left: int, direct_reads: list[int]) -> None:
    size = path.stat().st_size
    with TensorFile(path) as file, TensorReader() as reader:
        assert file.can_read_direct
        os.truncate(path, left)
        with pytest.raises(TensorFileError) as refused:
            reader.read(file, file.tensors["values"], torch.empty(NUM_BYTES, dtype=torch.uint8))
    assert str(refused.value) == f"{path}: expected {size} bytes, as when it was opened, got {left}"
    assert bool(direct_reads) == (left > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [False, True])
def test_a_gpu_gets_the_same_bytes(path: Path, direct_reads: list[int], cached: bool) -> None:
    got = read(path, device="cuda", cached=cached)
    more = sum(direct_reads) - (NUM_BYTES - START)
    assert (not direct_reads) if cached else (0 <= more < DIRECT_ALIGNMENT)
    assert torch.equal(got, bytes_from(path, START))
