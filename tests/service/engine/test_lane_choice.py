"""How decode and prefill share a device: the choice for measurements, in tables, and when it changes."""

import pytest

from expertd.service.engine.lane_choice import (
    CHUNKS,
    JOINED,
    Choice,
    Factors,
    Given,
    Load,
    Point,
    State,
    best,
    calculated,
    choices,
    expected,
    learned,
    next_state,
    point_at,
    slowdown,
)

# A decode step of 64 tokens, or of 1, and a prefill step, as they take on an H200.
DEEPSEEK_32 = Load(132, 8, Point(64, 368e-6), Point(4096, 3.0e-3))
RATE = 4096 / 3.0e-3  # of its prefill alone
DEEPSEEK_32_ONE = DEEPSEEK_32._replace(decode=Point(1, 107e-6))
DEEPSEEK_256 = Load(132, 8, Point(64, 2339e-6), Point(4096, 4.3e-3))
QWEN = Load(132, 8, Point(64, 174e-6), Point(4096, 0.5e-3))


@pytest.mark.parametrize(
    ("load", "target_ms", "choice"),
    [
        (DEEPSEEK_32, 0.5, Choice(64)),
        (DEEPSEEK_32, 0.8, Choice(64)),
        (DEEPSEEK_32, 1.6, Choice(32)),
        (DEEPSEEK_32, 3.1, Choice(16)),
        (DEEPSEEK_32, 10.0, JOINED),
        (DEEPSEEK_32_ONE, 0.45, Choice(32)),
        (DEEPSEEK_32_ONE, 1.0, Choice(16)),
        (DEEPSEEK_32_ONE, 5.0, Choice(0, 2048)),
        (DEEPSEEK_256, 7.0, Choice(48)),
        (DEEPSEEK_256, 14.0, JOINED),
        (QWEN, 0.5, Choice(48)),
        (QWEN, 2.0, JOINED),
    ],
)
def test_the_choice_for_a_layer_and_a_target(load: Load, target_ms: float, choice: Choice) -> None:
    found, _ = best(load, target_ms / 1e3)
    assert found.choice == choice
    assert found == expected(choice, load)


@pytest.mark.parametrize(
    ("choice", "decode_us", "share"),
    [
        (Choice(32), 1227, 0.76),
        (Choice(64), 681, 0.52),
        (JOINED, 6086, 0.99),
        (Choice(0, 2048), 3409, 0.88),
        (Choice(0, 1024), 2073, 0.72),
    ],
)
def test_what_a_choice_gives(choice: Choice, decode_us: float, share: float) -> None:
    found = calculated(choice, DEEPSEEK_32)
    assert found.decode_seconds * 1e6 == pytest.approx(decode_us, rel=0.01)
    assert found.prefill_share == pytest.approx(share, abs=0.01)


def test_joined_choices_need_room_until_one_was_measured() -> None:
    joined = 1e-6 * 6086
    assert expected(JOINED, DEEPSEEK_32).decode_seconds == pytest.approx(1.5 * joined, rel=0.01)
    assert best(DEEPSEEK_32, 1.4 * joined)[0].choice != JOINED
    measured = DEEPSEEK_32._replace(of_joined=Factors(decode=1.1))
    assert best(measured, 1.2 * joined)[0].choice == JOINED


def test_all_choices_are_within_bounds() -> None:
    found = choices(DEEPSEEK_32)
    assert found[: 1 + len(CHUNKS)] == [JOINED, *(Choice(0, chunk) for chunk in CHUNKS)]
    splits = [choice.decode_sms for choice in found[1 + len(CHUNKS) :]]
    assert splits == [16, 32, 48, 64, 80]
    short = choices(DEEPSEEK_32._replace(prefill=Point(1600, 1e-3)))
    assert [choice.chunk_tokens for choice in short if choice.chunk_tokens] == [1024]


def test_prefill_that_is_not_asked_for_is_worth_nothing() -> None:
    """Half of the device is enough for the prefill there is, so decode has the rest."""
    assert best(DEEPSEEK_32._replace(asked=0.5), 1.6e-3)[0].choice == Choice(64)


@pytest.mark.parametrize("present", [Choice(48), Choice(0, 1024)])
def test_with_one_kind_of_requests_all_sms_are_theirs(present: Choice) -> None:
    for load in (DEEPSEEK_32._replace(has_prefill=False), DEEPSEEK_32._replace(has_decode=False)):
        state, samples = State(expected(present, load), "start"), 0
        while state.expected.choice == present and samples < 20:
            state, samples = next_state(state, load, 1e-3), samples + 1
        if present.decode_sms or not load.has_decode:
            assert (state.expected.choice, samples) == (JOINED, 10), "not at once: the others may come back"
        else:
            assert samples == 20, "decode steps have all SMs already"


@pytest.mark.parametrize(
    "load",
    [
        DEEPSEEK_32._replace(has_prefill=False, has_decode=False),
        DEEPSEEK_32._replace(prefill=None),
        DEEPSEEK_32._replace(decode=None),
    ],
)
def test_nothing_changes_without_requests_or_measurements(load: Load) -> None:
    state = State(expected(Choice(80), load), "start")
    for _ in range(50):
        state = next_state(state, load, 10e-3)
    assert state == State(expected(Choice(80), load), "start")


def test_a_choice_changes_when_another_is_clearly_better_twice() -> None:
    state = State(expected(Choice(80), DEEPSEEK_32), "start")
    state = next_state(state, DEEPSEEK_32, 1.6e-3)
    assert (state.expected.choice, state.samples) == (Choice(80), 1)
    state = next_state(state, DEEPSEEK_32._replace(asked=0.3), 1.6e-3)
    assert (state.expected.choice, state.samples) == (Choice(80), 0)
    state = next_state(state, DEEPSEEK_32, 1.6e-3)
    state = next_state(state, DEEPSEEK_32, 1.6e-3)
    assert (state.expected.choice, state.why, state.samples) == (Choice(32), "prefill", 0)


def test_a_choice_that_is_just_good_enough_is_not_taken() -> None:
    """From 48 SMs, 32 would keep the target by 2%, which scatters more; from 32, they are kept."""
    given = {Choice(48): Given(0.9e-3, 0.67 * RATE), Choice(32): Given(1.22e-3, 0.77 * RATE)}
    load = DEEPSEEK_32._replace(given=given)
    for present in given:
        state = State(expected(present, load), "start")
        for _ in range(20):
            state = next_state(state, load, 1.25e-3)
            assert state.expected.choice == present


def test_a_split_that_may_be_just_good_enough_is_tried() -> None:
    """Its time is arithmetic, as long as it was never the present one."""
    load = DEEPSEEK_32._replace(given={Choice(48): Given(0.9e-3, 0.67 * RATE)})
    state = State(expected(Choice(48), load), "start")
    for _ in range(2):
        state = next_state(state, load, 1.25e-3)
    assert state.expected.choice == Choice(32)
    assert 0.95 * 1.25e-3 < state.expected.decode_seconds < 1.25e-3


def test_what_requests_take_beyond_a_step_counts() -> None:
    """Steps on 48 SMs keep the target, nearly all requests do not: those on 64 do."""
    load = DEEPSEEK_32._replace(decode=Point(64, 330e-6))
    assert best(load, 1e-3)[0].choice == Choice(48)
    state = State(expected(Choice(48), load), "start")
    for _ in range(2):
        state = next_state(state, load._replace(tail_seconds=0.35e-3), 1e-3)
    assert (state.expected.choice, state.why) == (Choice(64), "target")
    assert state.expected.decode_seconds == pytest.approx(330e-6 * slowdown(64, 132) + 0.35e-3)


@pytest.mark.parametrize(
    ("present", "target_ms", "why"),
    [(JOINED, 1.6, "target"), (Choice(64), 10.0, "prefill"), (JOINED, 0.1, "decode")],
)
def test_the_reason_for_a_change(present: Choice, target_ms: float, why: str) -> None:
    state = State(expected(present, DEEPSEEK_32), "start")
    for _ in range(2):
        state = next_state(state, DEEPSEEK_32, target_ms / 1e3)
    assert state.why == why


def test_what_is_learned_follows_the_measurements() -> None:
    point = None
    for seconds in (1e-3, 2e-3, 2e-3):
        point = learned(point, Point(64, seconds))
    assert point == pytest.approx(Point(64, 1.51e-3))


def test_a_chunk_tells_what_a_whole_step_takes() -> None:
    decode = Point(64, 400e-6)
    assert point_at(4096, Point(1088, 1424e-6), decode) == pytest.approx(Point(4096, 4432e-6))
    assert point_at(4096, Point(1024, 1e-3), None) == Point(4096, 4e-3)
    assert point_at(4096, Point(32, 1e-3), decode) == Point(4096, 0.128)


def test_looks_with_one_kind_of_requests_are_none_with_both() -> None:
    """Nine for all SMs and one for another split change nothing; two for that do, also with one between."""
    alone = DEEPSEEK_32._replace(has_prefill=False)
    state = State(expected(Choice(80), DEEPSEEK_32), "start")
    for _ in range(9):
        state = next_state(state, alone, 1.6e-3)
    state = next_state(state, DEEPSEEK_32, 1.6e-3)
    assert (state.expected.choice, state.samples, state.idle_samples) == (Choice(80), 1, 0)
    state = next_state(state, alone, 1.6e-3)
    assert (state.expected.choice, state.samples, state.idle_samples) == (Choice(80), 1, 1)
    assert next_state(state, DEEPSEEK_32, 1.6e-3).expected.choice == Choice(32)
