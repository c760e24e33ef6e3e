"""The parts of `benchmarks gemm_sweep` that need no GPU: points, turns, files, tables and picture."""

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from benchmarks import pictures
from benchmarks.gemm import deep_gemm_peer, gemm_sweep, heat_map
from benchmarks.gemm.gemm_sweep import Point, batches, parse_point
from benchmarks.lib.timing import medians_of_turns
from benchmarks.report import SECTIONS
from expertd.layout import Layout

Row = dict[str, Any]
ABOUT = {"gpu": "GPU, 1.2, x", "nvrtc": "13.0", "torch": "2", "copy_tbps": 4.0, "deep_gemm": "0.1"}
DOWN = Point(7168, 2048)


def row(speed: float, rows: int = 16, layout: str = "contiguous", groups: int = 1, n: int = 4096) -> Row:
    us = {"us": 10.0, "deep_gemm_us": 10 * speed, "speed": speed, "diff": 2e-7}
    return {"layout": layout, "groups": groups, "rows": rows, "n": n, "k": 7168} | us


def result(directory: Path, rows: list[Row]) -> Path:
    path = directory / "gemm_sweep-h200.json"
    path.write_text(json.dumps({"about": ABOUT, "rows": rows}))
    return path


def test_every_height_is_swept_for_every_number_of_groups() -> None:
    found = {
        (shape.layout, shape.rows)
        for batch in batches(DOWN)
        for shape in batch
        if (shape.n, shape.k) == (7168, 2048)
    }
    for groups in (1, 2, 4):
        for rows in gemm_sweep.ROWS:
            assert (Layout.CONTIGUOUS, (rows,) * groups) in found
            assert ((Layout.MASKED, (rows,) * groups) in found) == (rows <= 1200)
    assert min(gemm_sweep.ROWS) == 1
    assert max(gemm_sweep.ROWS) == 4096


def test_masked_groups_hold_their_rows() -> None:
    shapes = [shape for batch in batches(DOWN) for shape in batch]
    heights = {shape.rows[0]: shape.max_m for shape in shapes if shape.layout is Layout.MASKED}
    assert heights[1] == 128
    assert heights[129] == 256
    assert all(shape.max_m == 0 for shape in shapes if shape.layout is Layout.CONTIGUOUS)


def test_a_coarse_sweep_is_a_part_of_the_whole() -> None:
    whole, coarse = ([shape for batch in batches(DOWN, part) for shape in batch] for part in (False, True))
    assert set(coarse) < set(whole)
    assert len(coarse) < len(whole) / 2


@pytest.mark.parametrize("text", ["", "4096", "4096,7168,1", "4096,100", "0,128", "-128,128", "a,b"])
def test_invalid_points_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"expected N,K as multiples of 128 .* got '{text}'"):
        parse_point(text)


@pytest.mark.parametrize(
    ("workers", "sizes"), [(1, [5, 2]), (3, [5, 2]), (4, [3, 2, 1, 1]), (9, [2, 2, 1, 1, 1])]
)
def test_few_batches_are_cut_for_the_workers(workers: int, sizes: list[int]) -> None:
    whole = batches(DOWN)
    given = [whole[0][:5], whole[3][:2]]
    pieces = deep_gemm_peer.spread(given, workers)
    assert [len(piece) for piece in pieces] == sizes
    assert [shape for piece in pieces for shape in piece] == given[0] + given[1]


def launches(times: list[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Launches of these durations, one after the other, with another kernel before each."""
    found, now = [], 0.0
    for name, duration in times:
        found += [("transform", now, now + 50), (f"void {name}<1>", now + 50, now + 50 + duration)]
        now += 100 + duration
    return found


A, B = "grouped_gemm", "sm90_fp8_gemm"
TURNS = [(A, 5.0), (A, 9.0), (A, 7.0), (B, 3.0), (B, 4.0), (B, 3.5), *[(A, 6.0)] * 3, *[(B, 8.0)] * 3]


def test_the_better_of_two_medians_counts() -> None:
    assert medians_of_turns(launches(TURNS), [A, B], 3, 2) == [6.0, 3.5]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (TURNS[1:], "launches: expected 12 of .*, got 11"),
        (
            [TURNS[3], *TURNS[1:3], TURNS[0], *TURNS[4:]],
            "launch: expected grouped_gemm, got void sm90_fp8_gemm",
        ),
    ],
)
def test_other_launches_are_refused(times: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        medians_of_turns(launches(times), [A, B], 3, 2)


def test_rows_of_other_points_stay_in_the_file() -> None:
    old, new = [row(0.5), row(0.6, n=1536)], [row(1.1), row(1.2, rows=70)]
    assert gemm_sweep.merged(old, new) == [old[1], *new]


def test_the_sweeps_tables(tmp_path: Path) -> None:
    result(tmp_path, [row(0.5), row(2.0, rows=70), row(0.97, layout="masked", groups=4)])
    lines = SECTIONS["gemm-sweep"](tmp_path).splitlines()
    assert lines[2:4] == [
        "| contiguous | 1 | 2 | 1.00 | 0.50 to 2.00 | 1 |",
        "| masked | 4 | 1 | 0.97 | 0.97 to 0.97 | 0 |",
    ]
    assert lines[-1].endswith("(../gemm_sweep-h200.svg)")
    assert SECTIONS["gemm-sweep-worst"](tmp_path).replace("\n", " ") == (
        "1: contiguous, 1 of 16, 4096x7168: 0.50; 2: masked, 4 of 16, 4096x7168: 0.97; "
        "3: contiguous, 1 of 70, 4096x7168: 2.00."
    )
    assert SECTIONS["gemm-sweep-machine"](tmp_path).startswith("GPU, driver 1.2, NVRTC 13.0, torch 2")


def test_the_worst_points_are_numbered_in_the_picture(tmp_path: Path) -> None:
    many = [row(1 + n / 100, rows=n, groups=groups) for n in range(1, 12) for groups in (1, 2)]
    file = result(tmp_path, [*many, row(0.7, layout="masked", rows=33)])
    pictures.draw_sweep(file, tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    assert pictures.digest(file) in drawn
    for name in ("contiguous, 1 group", "masked, 1 group", "contiguous, 2 groups", "4096x7168", "33"):
        assert f"<!-- {name} -->" in drawn
    for place in range(1, heat_map.NUMBERED + 1):
        assert f"<!-- {place} -->" in drawn
    assert heat_map.worst(many)[0]["speed"] == 1.01


def test_the_numbered_cell_is_the_rows(tmp_path: Path) -> None:
    """The number and the colour are at the row's place: the second height of the first (N, K)."""
    rows = [row(1.2), row(0.9, rows=70), row(1.1, n=1536), row(1.3, rows=70, n=1536)]
    figure = heat_map.draw(rows, "title", "#00ff00", "#ff0000")
    axes = figure.axes[0]
    assert {text.get_text(): text.xy for text in axes.texts}["1"] == (1.5, 0.5)
    assert axes.collections[0].get_array().tolist() == [[1.2, 0.9], [1.1, 1.3]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["4096x7168", "1536x7168"]
    plt.close(figure)
