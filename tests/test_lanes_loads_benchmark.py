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
    """Decode without an answer is later than any target, and a request counts in all that it lies in."""
    decode = [(0.1, 0.101), (0.2, 0.203), (0.4, 1.2)]
    prefill = [(0.0, 0.1), (0.1, 0.2), (0.45, 0.5), (2.5, 2.6)]
    slots = list(lanes_loads.slots_of(PHASES, decode, prefill, 100))
    assert [(slot.decode, slot.prefill, slot.rate) for slot in slots] == [
        (8, True, 400), (8, True, 200), (1, True, 0), (8, False, 0), (8, False, 0), (0, True, 200),
    ]  # fmt: skip
    assert [slot.decode_seconds for slot in slots[:-1]] == pytest.approx([0.8, 0.8, 0.8, math.inf, math.inf])
    assert slots[-1].decode_seconds is None
    worth = [lanes_loads.worth([slot], Choice(48), 0.9, 400) for slot in slots]
    assert worth == [1, 0.5, 0, 0, 0, 0.5]
    assert lanes_loads.late_part(slots, 0.9) == pytest.approx(2 / 5)
    late = lanes_loads.worth([slots[0]], Choice(48), 0.4, 800)
    assert late == pytest.approx(0.5 * 0.5 / 2), "half of prefill's half, over 2"


def test_long_waits_count_by_their_time() -> None:
    """One of 400 requests in half a second is none of the slowest hundredth, but it is half of the time."""
    short = [(at * 1e-3, at * 1e-3 + 0.9e-3) for at in range(500)]
    assert lanes_loads.decode_seconds(short, 0.0, 0.5) == pytest.approx(0.9e-3)
    stalled = [*short[:250], (0.25, 0.5)]
    assert lanes_loads.decode_seconds(stalled, 0.0, 0.5) == pytest.approx(0.25)
    hardly = [*short[:496], (0.496, 0.5)]
    assert lanes_loads.decode_seconds(hardly, 0.0, 0.5) == pytest.approx(0.9e-3)


def test_a_fixed_choice_is_worth_what_its_phases_are() -> None:
    slots = [Slot(8, True, 1e-3, 200), Slot(8, True, 1e-3, 400), Slot(8, False, 0.5e-3, 0)]
    slots.append(Slot(0, True, None, 100))
    load = [Phase(2, 8, True), Phase(1, 8, False), Phase(1, 0, True)]
    kept = list(lanes_loads.as_if_kept(load, slots))
    assert [slot.rate for slot in kept] == [200, 400, 200, 400, 0, 0, 100, 100]
    assert lanes_loads.worth(kept, Choice(48), 1e-3, 400) == pytest.approx((2 * 0.75 + 1 * 1 + 1 * 0.25) / 4)


def test_the_last_slots_of_each_phase_count() -> None:
    phases = [Phase(3, 8, True), Phase(2, 1, True)]
    slots = [Slot(8, True, 1e-3, rate) for rate in range(6)] + [
        Slot(1, True, 1e-3, rate) for rate in range(4)
    ]
    assert [slot.rate for slot in lanes_loads.last_slots(phases, slots)] == [2, 3, 4, 5, 0, 1, 2, 3]


def test_loads_are_shown_beside_the_best_choice() -> None:
    row = {"layer": "tiny", "target_ms": 1.0, "load": "both", "best_worth": 0.8, "chosen_worth": 0.76}
    row |= {"best_late": 0.0, "chosen_late": 0.125}
    shown = loads_table([{**row, "best": [48, 0]}, {**row, "best": [0, 1024]}, {**row, "best": [0, 0]}])
    assert shown.splitlines()[2:] == [
        f"| tiny | 1 | both | {best} | 0.80 | 0.76 | 0.95 | 0% | 12% |"
        for best in ("48 SMs for decode", "joined, chunks of 1024", "joined")
    ]


@pytest.mark.slow
def test_callers_come_and_go_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_loads, "GAP_SECONDS", 0.3)
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
    assert all((slot.decode_seconds is not None) == bool(slot.decode) for slot in slots)
    assert all(slot.decode_seconds < 0.5 for slot in slots if slot.decode_seconds is not None)
    assert all(slot.rate > 0 for slot in slots if slot.prefill)
