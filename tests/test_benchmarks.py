"""What benchmarks do without a GPU: their shapes, their picture, and the results that the README tells."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.plot import draw
from benchmarks.shapes import Shape, all_shapes
from kernels.tiles import Layout

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "grouped_gemm-h200.json"


def test_shapes_depend_on_the_seed_alone() -> None:
    assert all_shapes(3) == all_shapes(3)
    assert all_shapes(3) != all_shapes(4)


def test_bytes_leave_out_groups_without_rows() -> None:
    shape = Shape("", Layout.CONTIGUOUS, (2, 0), 256, 128)
    weights, scales = 256 * 128, 2 * 4
    assert shape.bytes == weights + scales + 2 * (128 + 4 + 2 * 256)
    assert shape.flops == 2 * 2 * 256 * 128


def test_a_picture_shows_every_shape_twice(tmp_path: Path) -> None:
    draw(RESULT, tmp_path / "picture.svg")
    points = re.findall("<use ", (tmp_path / "picture.svg").read_text())
    assert len(points) >= 2 * len(json.loads(RESULT.read_text())["rows"])


def test_the_readme_tells_what_the_result_says() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    table = (ROOT / "README.md").read_text()
    for band in dict.fromkeys(row["band"] for row in rows):
        speeds = [row["speed"] for row in rows if row["band"] == band]
        line = re.search(rf"^\| {band} \| (\d+) \| [\d.]+ \| ([\d.]+) to ([\d.]+) \|", table, re.MULTILINE)
        assert line is not None, band
        assert int(line[1]) == len(speeds)
        assert float(line[2]) == pytest.approx(min(speeds), abs=0.005)
        assert float(line[3]) == pytest.approx(max(speeds), abs=0.005)
