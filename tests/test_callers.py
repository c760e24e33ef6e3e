"""Callers of a benchmark in several processes, and what is counted of them."""

from pathlib import Path

import pytest

from benchmarks.callers import together


def test_all_count_the_same_seconds_once_all_are_ready(tmp_path: Path) -> None:
    found = together("tests.late_caller", {"folder": str(tmp_path), "seconds": 0.5}, 3, lead=0.1)
    ready, begins, ends = found[:3], found[3:6], found[6:]
    assert ready[2] - ready[0] >= 0.3
    assert begins[0] == begins[2] >= ready[2] + 0.1
    assert ends == [begins[0] + 0.5] * 3


def test_a_caller_that_fails_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="a caller ended with code 1"):
        together("tests.late_caller", {}, 2, lead=0.1)
    assert "KeyError: 'folder'" in capfd.readouterr().err
