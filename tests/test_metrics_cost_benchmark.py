"""The parts of `benchmarks metrics_cost` that need no quiet machine: turns, intervals and rows."""

import json
import random
import urllib.request
from collections import Counter
from contextlib import nullcontext

import pytest

from benchmarks.serving import metrics_cost


def test_every_server_has_its_turns_at_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    switched: list[int] = []  # after as many turns

    def requests_of(port: int, connections: int) -> int:
        assert connections == 32
        turns.append(port)
        return 100 * (port + 1)

    monkeypatch.setattr(metrics_cost, "requests_of", requests_of)
    monkeypatch.setattr(metrics_cost, "scraping", lambda _: nullcontext())
    monkeypatch.setattr("os.kill", lambda *_: switched.append(len(turns)))
    monkeypatch.setattr(metrics_cost, "_cpu_seconds", lambda pid: float(len(turns)))
    servers = {name: (place, 0) for place, name in enumerate(metrics_cost.WAYS)}
    found = metrics_cost.measure(32, servers, 3)
    rounds = [turns[start : start + 6] for start in range(0, 18, 6)]
    assert all(each == each[::-1] and Counter(each) == {0: 2, 1: 2, 2: 2} for each in rounds)
    assert {each[0] for each in rounds} == {0, 1, 2}
    silent = [place for place, port in enumerate(turns) if port == 0]
    assert switched == [at for place in silent for at in (place, place + 1)], "off, and on again"
    assert found[0] == {"silent": (100.0, 0.01), "counting": (200.0, 0.005), "tracing": (300.0, 2 / 600)}
    row = metrics_cost.compare(found, ("counting", "silent"), 32)
    assert row == {"rates": [200, 100], "ratio": (2, 2, 2), "cpu_ratio": (0.5, 0.5, 0.5)}
    assert metrics_cost.line("metrics", row).startswith(
        "metrics: 200 and 100 requests/s, ratio 2.000 (2.000 to"
    )
    assert "cpu_ratio" not in metrics_cost.compare(found, ("counting", "silent"), 0)


def test_intervals_have_the_median_and_become_narrower() -> None:
    generator = random.Random(1)
    widths = []
    for count in (8, 128):
        values = [generator.gauss(1.0, 0.05) for _ in range(count)]
        middle, low, high = metrics_cost.median_with_interval(values)
        assert low <= middle <= high
        assert low < 1.0 < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


@pytest.mark.slow
def test_the_sink_takes_spans() -> None:
    with metrics_cost.started("--sink") as (port, _):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/traces", json.dumps({}).encode())
        assert urllib.request.urlopen(request, timeout=10).status == 200
