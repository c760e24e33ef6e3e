"""Mistakes of the identity of weights. The server's tests compare identities with its own."""

import json
from pathlib import Path

import numpy as np
import pytest

from expertd_client import weights_id

NAMES = ("gate_proj", "up_proj", "down_proj")
Tensors = dict[str, np.ndarray]


def layer() -> Tensors:
    return {f"model.layers.3.mlp.experts.0.{name}.weight": np.zeros((256, 512), np.uint8) for name in NAMES}


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
