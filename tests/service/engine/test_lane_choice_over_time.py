"""The choice over time, on a simulated device: nearly as good as the best fixed choice for each load.

The times are those that were measured on an H200, DeepSeek-V3 with 32 experts: they do not follow the line
that the choice assumes.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from expertd.service.engine.lane_choice import (
    JOINED,
    Choice,
    Expected,
    Load,
    Point,
    State,
    at,
    expected,
    learned,
    look,
    worth,
)

TOTAL, PREFILL_TOKENS, PREFILL_SECONDS = 132, 4096, 3.0e-3
ALONE = {64: 368e-6, 1: 107e-6}  # a decode step of so many tokens, on all SMs
ON_LANE = {  # of so many SMs, beside prefill: the same, and prefill's share
    16: ({64: 2429e-6, 1: 584e-6}, 0.90),
    32: ({64: 1168e-6, 1: 302e-6}, 0.82),
    48: ({64: 787e-6, 1: 218e-6}, 0.70),
    64: ({64: 582e-6, 1: 167e-6}, 0.59),
    80: ({64: 511e-6, 1: 161e-6}, 0.48),
}
SHARES = {0: 1.0, 512: 0.67, 1024: 0.96, 2048: 0.98}  # of prefill in steps of so many tokens; 0: whole
FIXED = [*map(Choice, ON_LANE), *(Choice(0, chunk) for chunk in SHARES)]
LOOKS_A_SECOND = 2


class Phase(NamedTuple):
    """A load for some time. decode: tokens of its steps; 0: none."""

    seconds: int
    decode: int
    prefill: bool


LOADS = {
    "both all the time": [Phase(60, 64, True)],
    "one kind at times": [Phase(30, 64, True), Phase(30, 64, False), Phase(30, 0, True)] * 2,
    "decode grows and shrinks": [Phase(30, 1, True), Phase(30, 64, True)] * 2,
}


def seconds_of(choice: Choice, decode: int, prefill: bool) -> tuple[float, float]:
    """Of a decode step, and of a step with prefill, as they are measured."""
    if choice.decode_sms:
        times, share = ON_LANE[choice.decode_sms]
        alone = ALONE[decode] * TOTAL / choice.decode_sms if decode else 0.0
        return (times[decode] if decode and prefill else alone), PREFILL_SECONDS / share
    tokens = choice.chunk_tokens or PREFILL_TOKENS
    step = PREFILL_SECONDS / PREFILL_TOKENS * tokens / SHARES[choice.chunk_tokens]
    return ALONE.get(decode, 0.0), step


def truth(choice: Choice, phase: Phase, tail: float = 0.0) -> Expected:
    """What a choice really gives; tail: seconds by which nearly all requests exceed a step."""
    decode, prefill = seconds_of(choice, phase.decode, phase.prefill)
    if choice.decode_sms:
        return Expected(choice, decode + tail, ON_LANE[choice.decode_sms][1])
    if phase.prefill:
        decode = prefill * (2 if choice.chunk_tokens else 3)
    return Expected(choice, decode + tail, SHARES[choice.chunk_tokens])


def measured(load: Load, choice: Choice, phase: Phase, tail: float = 0.0) -> Load:
    """`load` after steps of this phase."""
    if phase.decode and choice.decode_sms:
        load = load._replace(tail_seconds=tail)
    decode, prefill = seconds_of(choice, phase.decode, phase.prefill)
    part = choice.decode_sms / TOTAL
    if phase.decode and (choice.decode_sms or not phase.prefill):  # else all of them are joined
        step = Point(phase.decode, decode * (part or 1.0))
        load = load._replace(decode=learned(load.decode, step))
    if phase.prefill:
        tokens = choice.chunk_tokens or PREFILL_TOKENS
        step = at(PREFILL_TOKENS, Point(tokens + phase.decode, prefill * (1 - part)), load.decode)
        load = load._replace(prefill=learned(load.prefill, step))
    return load._replace(has_decode=phase.decode > 0, has_prefill=phase.prefill)


def looks(phases: list[Phase]) -> Iterator[Phase]:
    for phase in phases:
        yield from [phase] * (phase.seconds * LOOKS_A_SECOND)


def mean_worth(choices: list[Choice], phases: list[Phase], target_seconds: float, tail: float = 0.0) -> float:
    """Of the choice at each look."""
    values = []
    for choice, phase in zip(choices, looks(phases), strict=True):
        load = Load(TOTAL, 8, None, None, 1.0, phase.decode > 0, phase.prefill)
        values.append(worth(truth(choice, phase, tail), load, target_seconds))
    return sum(values) / len(values)


def chosen(phases: list[Phase], target_seconds: float, tail: float = 0.0) -> list[Choice]:
    """The choice at each look."""
    load = Load(TOTAL, 8, None, None)
    state = State(expected(Choice(48), load), "start")
    found = []
    for phase in looks(phases):
        found.append(state.expected.choice)
        load = measured(load, state.expected.choice, phase, tail)
        state = look(state, load, target_seconds)
    return found


@pytest.mark.parametrize("tail_ms", [0.0, 0.35])
@pytest.mark.parametrize("target_ms", [0.75, 1.0, 1.35, 3.0, 10.0])
@pytest.mark.parametrize("name", LOADS)
def test_it_is_nearly_as_good_as_the_best_fixed_choice(name: str, target_ms: float, tail_ms: float) -> None:
    phases, target, tail = LOADS[name], target_ms / 1e3, tail_ms / 1e3
    choices = chosen(phases, target, tail)
    count = len(choices)
    best = max(mean_worth([choice] * count, phases, target, tail) for choice in FIXED)
    assert mean_worth(choices, phases, target, tail) >= 0.9 * best


@pytest.mark.parametrize("tail_ms", [0.0, 0.35])
@pytest.mark.parametrize("target_ms", [0.75, 1.0, 1.35, 3.0])
@pytest.mark.parametrize("decode", [1, 64])
def test_decode_keeps_a_target_that_a_split_keeps(decode: int, target_ms: float, tail_ms: float) -> None:
    """With room for the scatter of measurements; whichever split it begins with."""
    phase, target, tail = Phase(20, decode, True), target_ms / 1e3, tail_ms / 1e3
    fixed = [truth(Choice(split), phase, tail).decode_seconds for split in ON_LANE]
    if min(fixed) <= 0.95 * target:
        late = chosen([phase], target, tail)[20:]
        assert all(truth(choice, phase, tail).decode_seconds <= target for choice in late)


@pytest.mark.parametrize("name", LOADS)
def test_it_changes_with_the_load_alone(name: str) -> None:
    """Graphs are captured at each change: not at every look."""
    choices = chosen(LOADS[name], 1.35e-3)
    changes = sum(one != other for one, other in itertools.pairwise(choices))
    assert changes <= 1 + 2 * len(LOADS[name])


def test_a_device_without_decode_serves_prefill_alone() -> None:
    assert chosen([Phase(60, 0, True)], 1e-3)[-1] == JOINED
