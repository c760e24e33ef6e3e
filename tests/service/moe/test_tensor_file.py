"""Files of tensors that are no such files, and files that change while they are read."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expertd.service.moe.tensor_file import TensorFile, TensorFileError
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.moe.weights import load_weights, random_weights, save_weights
from tests.service.moe.test_weights import SHAPE
from tests.service.processes import forked_python

VALUES = torch.arange(3 << 20, dtype=torch.int32).view(torch.uint8).view(3 << 10, 4096)  # 12 MiB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"values": VALUES, "one": torch.ones(1)}, tmp_path / "tensors.safetensors")
    return tmp_path / "tensors.safetensors"


def test_a_tensor_and_parts_of_it_are_read(path: Path) -> None:
    with TensorFile(path) as file, TensorReader() as reader:
        entry = file.tensors["values"]
        assert (entry.dtype, entry.shape) == ("U8", (3072, 4096))
        whole, rows = torch.empty_like(VALUES), torch.empty_like(VALUES[:5])
        reader.read(file, entry, whole)
        reader.read(file, entry, rows, 100 * 4096)
        reader.read(file, entry, torch.empty((0, 4096), dtype=torch.uint8))
    assert torch.equal(whole, VALUES)
    assert torch.equal(rows, VALUES[100:105])


def test_no_bytes_of_other_tensors_are_read(path: Path) -> None:
    with TensorFile(path) as file:
        with pytest.raises(IndexError, match="expected at most 4, got 1"):
            file.read(file.tensors["one"], memoryview(bytearray(4)), 1)
        with pytest.raises(IndexError):
            file.read(file.tensors["one"], memoryview(bytearray(4)), -1)


@pytest.mark.parametrize("left", [0, 4096, 8 << 20])
def test_a_file_truncated_after_it_was_opened_is_one_sentence(path: Path, left: int) -> None:
    size = path.stat().st_size
    with TensorFile(path) as file, TensorReader() as reader:
        os.truncate(path, left)
        with pytest.raises(TensorFileError) as refused:
            reader.read(file, file.tensors["values"], torch.empty_like(VALUES))
    assert str(refused.value) == f"{path}: expected {size} bytes, as when it was opened, got {left}"


def test_loaded_weights_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    save_weights(path, random_weights(SHAPE, 0, "cpu"))
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch\n"
        "from pathlib import Path\n"
        "from expertd.service.moe.shape import LayerShape\n"
        "from expertd.service.moe.weights import load_weights, random_weights\n"
        f"shape, path = {SHAPE!r}, {str(path)!r}\n"
        "weights = load_weights(path, shape, 'cpu')\n"
        "os.truncate(path, 0)\n"
        "expected = random_weights(shape, 0, 'cpu')\n"
        "same = lambda a, b: torch.equal(a.view(torch.uint8), b.view(torch.uint8))\n"
        "assert same(weights.gate_up.data, expected.gate_up.data)\n"
        "assert same(weights.down.data, expected.down.data)\n"
    )
    ended = forked_python(program)
    assert ended.returncode == 0, ended.stderr


def _file(tmp_path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def _entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "got"),
    [
        (b"{", b"", "a header that is not JSON"),
        (b"[" * 100_000, b"", "a header that is not JSON"),
        (b"\xff\xfe", b"", "a header that is not JSON"),
        ([], b"", "a header that is not a JSON object"),
        ({"a": 1}, b"", "no dtype, shape and data_offsets of tensor 'a'"),
        ({"a": _entry(dtype=1)}, bytes(4), "no dtype, shape and data_offsets of tensor 'a'"),
        ({"a": _entry(shape=[True])}, bytes(4), "no dtype, shape and data_offsets of tensor 'a'"),
        ({"a": _entry(offsets=[0])}, bytes(4), "no dtype, shape and data_offsets of tensor 'a'"),
        ({"a": _entry(offsets=[-4, 0])}, bytes(4), "no dtype, shape and data_offsets of tensor 'a'"),
        ({"a": _entry(shape=[2])}, bytes(4), "4 bytes for shape [2] of F32 of tensor 'a'"),
        ({"a": _entry(shape=[2**62, 4])}, bytes(4), "4 bytes for shape [4611686018427387904, 4] of F32"),
        ({"a": _entry("NEW", offsets=[4, 0])}, bytes(4), "tensor 'a' at byte "),
        ({"a": _entry(), "b": _entry()}, bytes(4), "tensor 'b' at byte "),
        ({"a": _entry(offsets=[4, 8])}, bytes(8), "tensor 'a' at byte "),
        ({"a": _entry()}, bytes(3), "bytes instead of "),
        ({"a": _entry()}, bytes(5), "bytes instead of "),
        ({}, bytes(5), "bytes instead of "),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, header: object, data: bytes, got: str) -> None:
    path = _file(tmp_path, header, data)
    with pytest.raises(TensorFileError) as refused:
        TensorFile(path)
    assert str(refused.value).startswith(f"{path}: expected a safetensors file, got: ")
    assert got in str(refused.value)


@pytest.mark.parametrize("length", [3, 2**63, 2**64 - 1, 100_000_001])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = _file(tmp_path, b"{}", length=length)
    with pytest.raises(TensorFileError, match=f"got: a header of {length} bytes in a file of 10$"):
        TensorFile(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.touch()
    with pytest.raises(TensorFileError, match=r"expected a safetensors file, got: 0 bytes$"):
        TensorFile(path)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_is_left(path: Path, tmp_path: Path) -> None:
    before = _descriptors()
    with TensorFile(path):
        assert _descriptors() == before + 1
    for bad in (_file(tmp_path, b"{"), tmp_path, tmp_path / "none"):
        with pytest.raises(TensorFileError):
            TensorFile(bad)
    assert _descriptors() == before


@pytest.mark.gpu
def test_a_gpu_gets_the_same_bytes(path: Path, tmp_path: Path) -> None:
    large = torch.randint(0, 256, (70 << 20,), dtype=torch.uint8)  # more than the buffer
    save_file({"large": large}, tmp_path / "large.safetensors")
    with TensorFile(tmp_path / "large.safetensors") as file, TensorReader() as reader:
        out = torch.empty_like(large, device="cuda")
        reader.read(file, file.tensors["large"], out)
    assert torch.equal(out.cpu(), large)


@pytest.mark.gpu
def test_weights_are_read_directly_to_a_gpu(tmp_path: Path) -> None:
    weights = random_weights(SHAPE, 0, "cpu")
    save_weights(tmp_path / "layer.safetensors", weights)
    loaded = load_weights(tmp_path / "layer.safetensors", SHAPE, "cuda", [2, 0])
    for mine, kept in ((loaded.gate_up, weights.gate_up), (loaded.down, weights.down)):
        assert torch.equal(mine.data.cpu().view(torch.uint8), kept.data[[2, 0]].view(torch.uint8))
        assert torch.equal(mine.scales.cpu(), kept.scales[[2, 0]])
