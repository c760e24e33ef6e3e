"""Callers of a benchmark in several processes, and what is counted of them."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lib.callers import together, window


def caller() -> None:
    """A caller, each process of which is ready at another time; it prints when, and its window."""
    given = json.loads(sys.stdin.readline())
    number = 0
    while True:  # the first number that no other process has taken
        try:
            (Path(given["folder"]) / str(number)).touch(exist_ok=False)
            break
        except FileExistsError:
            number += 1
    time.sleep(0.3 * number)
    ready = time.perf_counter()
    print(json.dumps([ready, *window(given["seconds"])]))


def test_all_count_the_same_seconds_once_all_are_ready(tmp_path: Path) -> None:
    found = together(__name__, {"folder": str(tmp_path), "seconds": 0.5}, 3, lead=0.1)
    ready, begins, ends = found[:3], found[3:6], found[6:]
    assert ready[2] - ready[0] >= 0.3
    assert begins[0] == begins[2] >= ready[2] + 0.1
    assert ends == [begins[0] + 0.5] * 3


def test_a_caller_that_fails_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="a caller ended with code 1"):
        together(__name__, {}, 1, lead=0.1)
    assert "KeyError: 'folder'" in capfd.readouterr().err


if __name__ == "__main__":
    caller()
