"""`benchmarks weights` on a small file: every way reads it, and the document has its rows."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.layer import weights
from benchmarks.report import SECTIONS
from expertd.service.checkpoints import models_of
from expertd.service.checkpoints.weights import read_layer
from expertd.service.settings.served import CheckpointSettings

SMALL = (256, 128, 8)


def test_the_checkpoint_is_a_layer_without_nans(tmp_path: Path) -> None:
    file = weights.make(tmp_path, SMALL)
    (model,) = models_of(CheckpointSettings(path=tmp_path, layers="1"))
    read = read_layer(model.source, "cpu", lambda _: None)
    assert len(read.gate_up.data) == 8 + 1
    assert read.gate_up.data.view(torch.uint8).flatten().bincount().count_nonzero() > 100, (
        "random numbers, which no storage shortens"
    )
    assert file.stat().st_size > 3 * 9 * 256 * 128


def test_each_way_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(weights.SIZES, "deepseek-v3", SMALL)
    file = tmp_path / "weights-cpu.json"
    options = ["--sizes", "deepseek-v3", "--rounds", "2", "--directory", str(tmp_path), "--json", str(file)]
    assert weights.main(options) == 0
    content = json.loads(file.read_text())
    ways = {row["way"] for row in content["rows"]}
    assert {"expertd", "safetensors", "dd"} <= ways
    assert len(content["rows"]) == 2 * len(ways), "cold and warm"
    assert all(0 < row["low"] <= row["GB/s"] <= row["high"] for row in content["rows"])
    assert "sizes deepseek-v3  cache cold  way expertd  GB/s " in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "the checkpoint is removed"
    shown = SECTIONS["weights"](tmp_path)
    assert len(shown.splitlines()) == 2 + len(ways - {"around the page cache", "dd iflag=direct"})
    assert content["about"]["machine"] in SECTIONS["weights-machine"](tmp_path).replace("\n", " ")
