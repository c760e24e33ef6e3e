"""Weights from a seed and from files, also from such as are none, or change while they are read."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from expertd.kernels import Quantized, decode
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.tensor_file import TensorFile, TensorFileError
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.moe.weights import ExpertWeights, load_weights, random_weights, save_weights
from expertd.service.moe.weights_file import OPTIONAL, tensor_specs
from expertd.service.settings.model import Settings
from tests.paths import ROOT
from tests.service.processes import forked_python

SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=3, top_k=2)


def _bytes(weights: ExpertWeights) -> list[torch.Tensor]:
    tensors = (weights.router, *weights.gate_up, *weights.down)
    return [tensor.view(torch.uint8) for tensor in tensors]


def _equal(a: ExpertWeights, b: ExpertWeights) -> bool:
    return all(torch.equal(x, y) for x, y in zip(_bytes(a), _bytes(b), strict=True))


def test_a_seed_gives_the_same_weights_again() -> None:
    assert _equal(random_weights(SHAPE, 5, "cpu"), random_weights(SHAPE, 5, "cpu"))
    assert not _equal(random_weights(SHAPE, 5, "cpu"), random_weights(SHAPE, 6, "cpu"))


def _part(weights: ExpertWeights, groups: list[int]) -> ExpertWeights:
    """The same with only these groups."""
    gate_up, down = (Quantized(w.data[groups], w.scales[groups]) for w in (weights.gate_up, weights.down))
    return replace(weights, gate_up=gate_up, down=down)


@pytest.mark.parametrize(
    ("num_shared", "part", "shared", "groups"),
    [
        (0, range(1), True, [0]),
        (0, range(1, 3), True, [1, 2]),
        (2, range(1), True, [0, 3, 4]),
        (2, range(2, 3), True, [2, 3, 4]),
        (0, [2, 1, 0], True, [2, 1, 0]),
        (2, [0, 1, 1, 0, 2], True, [0, 1, 1, 0, 2, 3, 4]),
        (2, None, True, [0, 1, 2, 3, 4]),
        (2, None, False, [0, 1, 2]),
        (2, [2, 0], False, [2, 0]),
        (0, [1], False, [1]),
    ],
)
def test_part_of_the_experts_is_that_of_the_whole(
    num_shared: int, part: Sequence[int] | None, shared: bool, groups: list[int], tmp_path: Path
) -> None:
    shape = replace(SHAPE, num_shared_experts=num_shared)
    whole = random_weights(shape, 5, "cpu")
    expected = _part(whole, groups)
    assert _equal(random_weights(shape, 5, "cpu", part, shared), expected)
    bias = torch.tensor([0.5, -1.0, 2.0])
    gate = torch.linspace(-1, 1, SHAPE.hidden_size) if num_shared else None
    save_weights(tmp_path / "layer.safetensors", replace(whole, router_bias=bias, shared_gate=gate))
    loaded = load_weights(tmp_path / "layer.safetensors", shape, "cpu", part, shared)
    assert _equal(loaded, expected)
    assert loaded.gate_up.scales.is_contiguous()
    assert (loaded.shared_gate is not None) == (num_shared > 0 and shared)
    assert loaded.shared_gate is None or torch.equal(loaded.shared_gate, torch.linspace(-1, 1, 256))
    assert loaded.router_bias is not None
    assert torch.equal(loaded.router_bias, bias)


def test_random_weights_keep_the_magnitude_of_a_token() -> None:
    weights = random_weights(SHAPE, 0, "cpu")
    assert weights.gate_up.data.shape == (3, 256, 256)
    assert weights.down.data.shape == (3, 256, 128)
    for matrix, fan_in in ((weights.gate_up, 256), (weights.down, 128)):
        assert decode(matrix).std().item() == pytest.approx(fan_in**-0.5, rel=0.05)


def test_random_weights_of_a_size_without_whole_blocks() -> None:
    weights = random_weights(LayerShape(192, 128, 4, 2), 0, "cpu")
    assert weights.gate_up.scales.shape == (4, 2, 2)
    assert weights.down.scales.shape == (4, 2, 1)


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    path, weights = tmp_path / "layer.safetensors", random_weights(SHAPE, 1, "cpu")
    save_weights(path, weights)
    with pytest.raises(ValueError, match=r"router shape: expected \(4, 256\), got \(3, 256\)"):
        load_weights(path, LayerShape(256, 128, 4, 2), "cpu")
    with pytest.raises(ValueError, match=r"gate_up shape: expected \(3, 512, 256\), got \(3, 256, 256\)"):
        load_weights(path, LayerShape(256, 256, 3, 2), "cpu")
    save_weights(path, replace(weights, router_bias=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"router_bias shape: expected \(3,\), got \(2,\)"):
        load_weights(path, SHAPE, "cpu")


def test_a_file_with_other_tensors_is_refused(tmp_path: Path) -> None:
    path, weights = tmp_path / "layer.safetensors", random_weights(SHAPE, 1, "cpu")
    save_weights(path, replace(weights, shared_gate=torch.ones(SHAPE.hidden_size)))
    with pytest.raises(ValueError, match=r"expected tensors down, .*, got 1 unknown: shared_gate$"):
        load_weights(path, SHAPE, "cpu")
    save_weights(path, weights)
    tensors = load_file(path)
    save_file({**tensors, "down_scale": tensors["down_scale"].half()}, path)
    with pytest.raises(ValueError, match=r"down_scale dtype: expected F32, got F16"):
        load_weights(path, SHAPE, "cpu")


def test_a_missing_or_invalid_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    with pytest.raises(ValueError, match=r"layer\.safetensors: cannot be read: No such file"):
        load_weights(path, SHAPE, "cpu")
    path.write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="expected a safetensors file, got"):
        load_weights(path, SHAPE, "cpu")


@pytest.mark.parametrize("padding", range(0, 16, 4))
def test_loaded_tensors_are_aligned_for_the_kernels(tmp_path: Path, padding: int) -> None:
    """The file's header may have any length, and the tensors follow it."""
    path = tmp_path / "weights.safetensors"
    save_weights(path, random_weights(SHAPE, 0, "cpu"))
    save_file(load_file(path), path, metadata={"note": "x" * padding})
    weights = load_weights(path, SHAPE, "cpu")
    for tensor in (weights.router, *weights.gate_up, *weights.down):
        assert tensor.data_ptr() % 16 == 0


def test_an_error_about_a_foreign_file_stays_short(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    foreign = {f"model.layers.{n}.mlp.{'x' * 200}": torch.zeros(1) for n in range(500)}
    save_file({**foreign, "router": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"got no down, down_scale, gate_up and 1 more, and 500 unknown: "):
        load_weights(path, SHAPE, "cpu")
    with pytest.raises(ValueError, match=r" and 497 more$") as refused:
        load_weights(path, SHAPE, "cpu")
    assert len(str(refused.value)) < 500 + len(str(path))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_documented_example_writes_a_file_that_can_be_served(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "checkpoints.md").read_text().partition("## Your own weights")[2]
    (example,) = re.findall(r"^```python\n(.*?)^```$", document, re.M | re.S)
    program = tmp_path / "example.py"
    program.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{example}")
    assert forked_python(program).returncode == 0
    (settings,) = re.findall(r"^```yaml\n(.*?)^```$", document, re.M | re.S)
    (model,) = Settings.model_validate(yaml.safe_load(settings)).models
    assert model.weights.path is not None
    weights = load_weights(tmp_path / model.weights.path, model.shape, "cpu")
    assert weights.router_bias is not None


def test_the_documented_tensors_are_those_that_are_read() -> None:
    document = (ROOT / "docs" / "checkpoints.md").read_text().partition("## Your own weights")[2]
    table = re.findall(r"^\| `(\w+)`( \(optional\))? \| `(\[.*?\])` \| (.*?) \|", document, re.M)
    shape = LayerShape(1024, 384, 5, 2, num_shared_experts=1)
    sizes = {"E": 5, "G": 6, "H": 1024, "I": 384}
    documented = {
        name: (tuple(eval(size, sizes)), tuple(dtypes.split(" or "))) for name, _, size, dtypes in table
    }
    assert documented == {name: tuple(spec) for name, spec in tensor_specs(shape).items()}
    assert {name for name, optional, _, _ in table if optional} == OPTIONAL


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
        f"shape, path = LayerShape(256, 128, 3, 2), {str(path)!r}\n"
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
