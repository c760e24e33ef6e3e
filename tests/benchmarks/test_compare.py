"""`benchmarks grouped_gemm --compare`: which shapes count as slower."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gemm import compare, grouped_gemm
from benchmarks.gemm.shapes import all_shapes

Row = dict[str, Any]


def row(us: float, theirs: float | None = None, shape: str = "a", rows: tuple[int, ...] = (3, 4)) -> Row:
    peer = {"deep_gemm_us": theirs, "speed": theirs / us} if theirs else {}
    return {"shape": shape, "rows": list(rows), "us": us} | peer


def committed(tmp_path: Path, rows: list[Row]) -> dict[compare.Key, Row]:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"about": {}, "rows": rows}))
    return compare.committed(file)


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (row(104), row(100), False),
        (row(106), row(100), True),
        (row(90), row(100), False),
        (row(106, 100), row(100, 100), True),
        (row(106, 106), row(100, 100), False),  # a slower card
        (row(100, 90), row(100, 100), False),  # only DeepGEMM's time differs
        (row(106, 100), row(100), True),  # no DeepGEMM there: the time alone
    ],
)
def test_slower_is_more_than_noise_in_time_and_speed(now: Row, before: Row, expected: bool) -> None:
    assert compare.is_slower(now, before) == expected


def sequence(*rows: Row) -> tuple[Callable[[int], Row], list[int]]:
    """A function that measures again with these results, and the indices it was asked for."""
    left, asked = list(rows), []

    def again(index: int) -> Row:
        asked.append(index)
        return left.pop(0)

    return again, asked


def test_a_shape_is_slower_if_every_measurement_is(tmp_path: Path) -> None:
    before = committed(tmp_path, [row(50, shape="b"), row(100)])
    again, asked = sequence(row(112), row(109))
    found = compare.slower_rows([row(50, shape="b"), row(110)], before, again)
    assert [(now["us"], old["us"]) for now, old in found] == [(109, 100)]
    assert asked == [1, 1]


def test_the_better_time_of_each_side_counts(tmp_path: Path) -> None:
    """Ours is slower in both; DeepGEMM was slow too only the first time."""
    again, _ = sequence(row(112, 100), row(112, 104))
    found = compare.slower_rows([row(110, 110)], committed(tmp_path, [row(100, 100)]), again)
    assert found == []  # 110 against 110: this card looked slower, and was not measured again
    again, _ = sequence(row(109, 100), row(112, 104))
    ((now, _),) = compare.slower_rows([row(110, 102)], committed(tmp_path, [row(100, 100)]), again)
    assert (now["us"], now["deep_gemm_us"], now["speed"]) == (109, 100, 100 / 109)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": [1]}'])
def test_another_file_is_refused_in_a_sentence(content: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    with pytest.raises(SystemExit, match=r"--compare: .*expected a result of benchmarks grouped_gemm, got"):
        grouped_gemm.committed_rows(file, all_shapes())
    with pytest.raises(SystemExit, match=r"--compare: .*No such file"):
        grouped_gemm.committed_rows(tmp_path / "none.json", all_shapes())
