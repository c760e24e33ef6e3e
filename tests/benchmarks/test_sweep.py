"""The parts of `benchmarks gemm_sweep` that need no GPU: points, turns, files, tables and picture."""

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from benchmarks.gemm import gemm_sweep, heat_map
from benchmarks.gemm.gemm_sweep import Point, batches, parse_point
from benchmarks.lib.timing import medians_of_rounds
from expertd.layout import Layout

Row = dict[str, Any]
DOWN = Point(7168, 2048)


def row(speed: float, rows: int = 16, layout: str = "contiguous", groups: int = 1, n: int = 4096) -> Row:
    us = {"us": 10.0, "deep_gemm_us": 10 * speed, "speed": speed, "diff": 2e-7}
    return {"layout": layout, "groups": groups, "rows": rows, "n": n, "k": 7168} | us


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


@pytest.mark.parametrize("text", ["", "4096", "4096,7168,1", "4096,100", "0,128", "-128,128", "a,b"])
def test_invalid_points_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"expected N,K as multiples of 128 .* got '{text}'"):
        parse_point(text)


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
    assert medians_of_rounds(launches(TURNS), [A, B], 3, 2) == [6.0, 3.5]


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
        medians_of_rounds(launches(times), [A, B], 3, 2)


def test_the_numbered_cell_is_the_rows(tmp_path: Path) -> None:
    """The number and the colour are at the row's place: the second height of the first (N, K)."""
    rows = [row(1.2), row(0.9, rows=70), row(1.1, n=1536), row(1.3, rows=70, n=1536)]
    figure = heat_map.draw(rows, "title", "#00ff00", "#ff0000")
    axes = figure.axes[0]
    assert {text.get_text(): text.xy for text in axes.texts}["1"] == (1.5, 0.5)
    assert axes.collections[0].get_array().tolist() == [[1.2, 0.9], [1.1, 1.3]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["4096x7168", "1536x7168"]
    plt.close(figure)
