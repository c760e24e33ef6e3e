"""`benchmarks.lanes_loads`: callers come and go in phases, and every half second of theirs counts."""

import math
from pathlib import Path

import pytest

from benchmarks import lanes_loads
from benchmarks.lanes_loads import Phase, Slot
from benchmarks.lanes_loads_table import loads_table
from benchmarks.lanes_server import Server
from benchmarks.lanes_ways import LAYERS, Way, settings_of
from benchmarks.serving_rows import free_port
from expertd.service.engine.lane_choice import Choice

PHASES = [Phase(1, 8, True), Phase(0.5, 1, True), Phase(1, 8, False), Phase(0.5, 0, True)]


def test_callers_are_busy_in_their_phases() -> None:
    assert lanes_loads.spans(PHASES, 8) == [(0, 1), (1.5, 2.5)]
    assert lanes_loads.spans(PHASES, 1) == [(1, 1.5)]
    assert lanes_loads.spans(PHASES, 0) == [(0, 1.5), (2.5, 3)]


def test_every_half_second_counts() -> None:
    """By when requests were answered; decode without an answer is later than any target."""
    decode = [(0.1, 0.101), (0.2, 0.203), (0.4, 1.2)]
    prefill = [(0.0, 0.1), (0.1, 0.2), (0.45, 0.5), (2.5, 2.6)]
    slots = list(lanes_loads.slots_of(PHASES, decode, prefill, 100))
    assert [(slot.decode, slot.prefill, slot.rate) for slot in slots] == [
        (8, True, 400), (8, True, 200), (1, True, 0), (8, False, 0), (8, False, 0), (0, True, 200),
    ]  # fmt: skip
    assert [slot.p99_seconds for slot in slots[:-1]] == pytest.approx(
        [3e-3, math.inf, 0.8, math.inf, math.inf]
    )
    assert slots[-1].p99_seconds is None
    worth = [lanes_loads.worth([slot], Choice(48), 3.5e-3, 400) for slot in slots]
    assert worth == [1, 0, 0, 0, 0, 0.5]
    late = lanes_loads.worth([slots[0]], Choice(48), 1.5e-3, 800)
    assert late == pytest.approx(0.5 * 0.5 / 2), "half of prefill's half, over 2"


def test_a_fixed_choice_is_worth_what_its_phases_are() -> None:
    slots = [Slot(8, True, 1e-3, 300), Slot(8, False, 0.5e-3, 0), Slot(0, True, None, 100)]
    load = [Phase(2, 8, True), Phase(1, 8, False), Phase(1, 0, True)]
    found = lanes_loads.worth_of_load(load, slots, Choice(48), 1e-3, 400)
    assert found == pytest.approx((2 * 0.75 + 1 * 1 + 1 * 0.25) / 4)


def test_the_last_slots_of_each_phase_count() -> None:
    phases = [Phase(1.5, 8, True), Phase(1, 1, True)]
    slots = [Slot(8, True, 1e-3, rate) for rate in range(3)] + [Slot(1, True, 1e-3, rate) for rate in (3, 4)]
    assert [slot.rate for slot in lanes_loads.last_slots(phases, slots)] == [1, 2, 3, 4]


def test_loads_are_shown_beside_the_best_choice() -> None:
    row = {"layer": "tiny", "target_ms": 1.0, "load": "both", "best_worth": 0.8, "chosen_worth": 0.76}
    shown = loads_table([{**row, "best": [48, 0]}, {**row, "best": [0, 1024]}, {**row, "best": [0, 0]}])
    assert shown.splitlines()[2:] == [
        f"| tiny | 1 | both | {best} | 0.80 | 0.76 | 0.95 |"
        for best in ("48 SMs for decode", "joined, chunks of 1024", "joined")
    ]


@pytest.mark.slow
def test_callers_come_and_go_on_a_cpu(tmp_path: Path) -> None:
    layer = LAYERS["tiny"]
    server, callers = Server(), lanes_loads.Callers(layer, layer.decode, None)
    try:
        settings = settings_of(layer, Way("lanes", lanes=True), tmp_path)
        with server.running({**settings, "port": free_port()}) as url:
            for phases in (PHASES[:1], PHASES):
                slots = callers.run(url, phases)
    finally:
        server.close()
        callers.close()
    assert [(slot.decode, slot.prefill) for slot in slots] == [
        (8, True), (8, True), (1, True), (8, False), (8, False), (0, True),
    ]  # fmt: skip
    assert all((slot.p99_seconds is not None) == bool(slot.decode) for slot in slots)
    assert all(slot.p99_seconds < 0.5 for slot in slots if slot.p99_seconds is not None)
    assert all((slot.rate > 0) == slot.prefill for slot in slots)
