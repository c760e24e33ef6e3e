"""The identity of weights, from files written by hand. The server's tests compare it with its own."""

import json
from pathlib import Path

import numpy as np
import pytest

from expertd_client import weights_id

NAMES = ("gate_proj", "up_proj", "down_proj")
Tensors = dict[str, np.ndarray]


def layer(prefix: str = "model.layers.3.mlp.") -> Tensors:
    random = np.random.default_rng(54)
    made: Tensors = {
        f"{prefix}experts.{expert}.{name}.weight": random.integers(0, 256, (256, 512), np.uint8)
        for expert in range(2)
        for name in NAMES
    }
    made |= {name + "_scale_inv": random.integers(0, 256, (2, 4), np.uint8) for name in list(made)}
    made[f"{prefix}gate.weight"] = random.integers(0, 256, (2, 512), np.uint8)
    made[f"{prefix}shared_experts.up_proj.weight"] = random.integers(0, 256, (256, 512), np.uint8)
    made[prefix.replace("3", "4") + "experts.0.up_proj.weight"] = made[f"{prefix}gate.weight"]
    return made


def write(directory: Path, *files: Tensors) -> Path:
    """A checkpoint of one file, or of several with an index."""
    directory.mkdir()
    index: dict[str, str] = {}
    for number, tensors in enumerate(files):
        file = "model.safetensors" if len(files) == 1 else f"model-{number}.safetensors"
        header, begin = {}, 0
        for name, tensor in tensors.items():
            offsets = [begin, begin := begin + tensor.nbytes]
            header[name] = {"dtype": "U8", "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        data = b"".join(tensor.tobytes() for tensor in tensors.values())
        (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
        index |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def test_what_does_not_count(tmp_path: Path) -> None:
    expected = weights_id(write(tmp_path / "one", layer()), 3)
    items = list(layer().items())[::-1]
    assert weights_id(write(tmp_path / "two", dict(items[:5]), dict(items[5:])), 3) == expected
    assert weights_id(write(tmp_path / "other", layer("language_model.model.layers.3.mlp.")), 3) == expected
    others = layer()
    for name in ("gate.weight", "shared_experts.up_proj.weight"):
        others[f"model.layers.3.mlp.{name}"] += 1
    assert weights_id(write(tmp_path / "router", others), 3) == expected


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("experts.0.up_proj.weight", 0),  # the ends and the middle of a large one
        ("experts.1.down_proj.weight", 256 * 512 - 1),
        ("experts.1.gate_proj.weight", 256 * 256 - 1),
        ("experts.0.down_proj.weight", 256 * 256),
        *[("experts.1.up_proj.weight_scale_inv", at) for at in (0, 3, 7)],
    ],
)
def test_what_counts(tmp_path: Path, name: str, at: int) -> None:
    others = layer()
    others[f"model.layers.3.mlp.{name}"].flat[at] += 1
    assert weights_id(write(tmp_path / "a", layer()), 3) != weights_id(write(tmp_path / "b", others), 3)


def test_mistakes(tmp_path: Path) -> None:
    made = write(tmp_path / "made", layer())
    with pytest.raises(ValueError, match="layer 7: expected experts' tensors, got none"):
        weights_id(made, 7)
    with pytest.raises(FileNotFoundError):
        weights_id(tmp_path / "none", 3)
    whole = (made / "model.safetensors").read_bytes()
    for data in (b"", b"\0" * 8, whole[:50], b"\xff" * 64, (4).to_bytes(8, "little") + b"[{}]"):
        broken = write(tmp_path / f"broken{len(data)}", layer())
        (broken / "model.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match="expected"):
            weights_id(broken, 3)
    short = write(tmp_path / "short", layer())
    (short / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="more bytes, got"):
        weights_id(short, 3)
    index = write(tmp_path / "index", layer(), layer())
    (index / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="expected JSON with a weight_map"):
        weights_id(index, 3)
