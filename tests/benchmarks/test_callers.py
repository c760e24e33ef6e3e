"""Callers of a benchmark in several processes, and what is counted of them."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.caller import call_together
from benchmarks.lib.processes import demo_server


def caller() -> None:
    """A caller, each process of which is ready at another time; it notes when, and its window."""
    given = json.loads(sys.stdin.readline())
    number = 0
    while True:  # the first number that no other process has taken
        try:
            (file := Path(given["folder"]) / str(number)).touch(exist_ok=False)
            break
        except FileExistsError:
            number += 1
    time.sleep(0.3 * number)
    ready = time.perf_counter()
    print(json.dumps("ready"), flush=True)
    window = json.loads(sys.stdin.readline())
    file.write_text(json.dumps({"ready": ready, **window}))
    start = round(1e9 * window["start"])
    stamps = [(start - 1, start + 7), (start + 1, start + 1 + 10**9 * (number + 1))]
    print(json.dumps({"stamps": stamps}))


def test_all_count_the_same_seconds_once_all_are_ready(tmp_path: Path) -> None:
    found = call_together({"folder": str(tmp_path)}, 0.5, 3, lead=0.1, module=__name__)
    assert found == [1.0, 2.0, 3.0], "of requests that were sent since the start"
    noted = [json.loads((tmp_path / str(number)).read_text()) for number in range(3)]
    assert noted[2]["ready"] - noted[0]["ready"] >= 0.3
    assert len({each["start"] for each in noted}) == 1
    assert noted[0]["start"] >= noted[2]["ready"] + 0.1
    assert [each["seconds"] for each in noted] == [0.5] * 3


def test_a_caller_that_fails_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="a program ended with code 1"):
        call_together({}, 0.1, module=__name__)
    assert "KeyError: 'folder'" in capfd.readouterr().err


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server with channels and regions."""
    socket = tmp_path_factory.mktemp("channels") / "socket"
    with demo_server(f"channels.socket={socket}", "shared_memory.enabled=true") as (number, _):
        yield number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("http", {"connections": 3}),
        ("http", {"datatype": "FP32", "tokens": 2048}),
        ("region", {"connections": 2}),
        ("channel", {"connections": 2, "slots": 3}),
    ],
)
def test_every_way_gets_answers(way: str, more: dict[str, Any], port: int) -> None:
    given = {"way": way, "url": f"http://127.0.0.1:{port}", "models": ["demo"], "tokens": 4}
    found = call_together({**given, "hidden_size": 512, **more}, 0.3)
    assert found == sorted(found)
    assert found[0] > 0


if __name__ == "__main__":
    caller()
