"""How long steps will take, from recent ones."""

from typing import Any

import numpy as np
import pytest

from expertd.service.engine.forecast import ArrivalRate, Forecast


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def forecast(clock: Clock) -> Forecast:
    return Forecast(clock)


def seconds(num_tokens: float) -> float:
    """Of a step on a device with fixed costs."""
    return 0.002 + 1e-5 * num_tokens


def test_a_line_through_steps_of_several_sizes(forecast: Forecast, clock: Clock) -> None:
    for tokens in (1, 100, 2000, 30):
        forecast.note(tokens, seconds(tokens))
        clock.now += 0.01
    for tokens in (1, 500, 2000, 3000):
        assert forecast.step(tokens) == pytest.approx(seconds(tokens))


def test_steps_of_one_size_are_in_proportion_up_to_twice_it(forecast: Forecast) -> None:
    for _ in range(3):
        forecast.note(100, 0.01)
    assert forecast.step(100) == pytest.approx(0.01)
    assert forecast.step(1) == pytest.approx(0.0001)
    assert forecast.step(200) == pytest.approx(0.02)
    assert forecast.step(4096) == pytest.approx(0.02), "nothing is known of such steps"


def test_no_recent_step_says_nothing(forecast: Forecast, clock: Clock) -> None:
    assert forecast.step(1) == 0.0
    forecast.note(100, 5.0)
    clock.now += 0.99
    assert forecast.step(100) == pytest.approx(5.0)
    clock.now += 0.02
    assert forecast.step(100) == 0.0
    forecast.note(100, 0.01)
    assert forecast.step(100) == pytest.approx(0.01), "and is forgotten"


def test_newer_steps_count_more(forecast: Forecast, clock: Clock) -> None:
    forecast.note(100, 0.01)
    clock.now += 0.5
    forecast.note(100, 0.02)
    assert forecast.step(100) == pytest.approx((0.01 / 4 + 0.02) / 1.25)


def test_larger_steps_never_take_less(forecast: Forecast) -> None:
    forecast.note(10, 0.02)
    forecast.note(1000, 0.01)
    assert forecast.step(1) == forecast.step(1000) == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("num_tokens", "room", "more", "steps"),
    [
        (64, 64, {}, [64]),
        (65, 64, {}, [64, 1]),
        (1, 64, {"wait": 0.5}, [1]),
        (1, 4096, {"arriving": 1000}, [1]),  # it begins at once
        (1, 4096, {"wait": 0.05, "arriving": 1000}, [1 + 50]),
        (1, 16, {"wait": 0.05, "arriving": 1000}, [16]),  # there is no room for more
        (1, 64, {"behind": 30}, [31]),
        (60, 64, {"behind": 30}, [64]),
    ],
)
def test_a_request_waits_for_full_steps_and_its_own_has_what_arrives_before(
    forecast: Forecast, num_tokens: int, room: int, more: dict[str, Any], steps: list[int]
) -> None:
    for tokens in (1, 64):
        forecast.note(tokens, seconds(tokens))
    expected = more.get("wait", 0.0) + sum(map(seconds, steps))
    assert forecast.until_end(num_tokens, room, **more) == pytest.approx(expected)


def test_the_rate_of_arrivals(clock: Clock) -> None:
    arrivals = ArrivalRate(clock)
    assert arrivals.per_second == 0.0
    for _ in range(1000):
        arrivals.note(1, clock.now)
        clock.now += 0.001
    assert arrivals.per_second == pytest.approx(1000, rel=0.1)
    clock.now += 0.25
    assert arrivals.per_second == pytest.approx(500, rel=0.1)
    clock.now += 1.0
    assert arrivals.per_second == 0.0


def test_the_margin_is_what_nearly_all_steps_stay_within() -> None:
    clock = Clock()
    forecast, random = Forecast(clock), np.random.default_rng(1)
    took = 0.01 * random.lognormal(0.0, 0.25, 400)
    within = []
    for seconds in took:
        if forecast.step(100):
            within.append(seconds <= forecast.margin * forecast.step(100))
        forecast.note(100, seconds)
        clock.now += 0.01
    assert np.mean(within[20:]) >= 0.94
    assert 1.25 < forecast.margin < 2.0


def test_even_steps_need_the_least_margin(forecast: Forecast, clock: Clock) -> None:
    assert forecast.margin == 1.1
    for tokens in (1, 100, 2000, 30, 500, 100, 2000, 1):
        forecast.note(tokens, seconds(tokens))
        clock.now += 0.1
        assert forecast.margin == 1.1


def test_steady_steps_are_in_doubt_after_a_tenth_of_a_second(forecast: Forecast, clock: Clock) -> None:
    assert forecast.is_doubtful(100), "nothing is known"
    for _ in range(3):
        forecast.note(100, 0.02)
    clock.now += 0.09
    assert not forecast.is_doubtful(100)
    clock.now += 0.02
    assert forecast.is_doubtful(100)


def test_after_single_slow_steps_an_idle_device_tries_soon(forecast: Forecast, clock: Clock) -> None:
    """After as long as the next one likely takes."""
    for seconds in (0.002, 0.002, 0.06):
        forecast.note(100, seconds)
    assert forecast.step(100) > 0.01, "too long for a timeout of 10 ms"
    clock.now += 0.9 * forecast.step(100)
    assert not forecast.is_doubtful(100)
    clock.now += 0.2 * forecast.step(100)
    assert forecast.is_doubtful(100)


@pytest.mark.parametrize(("seconds", "slow"), [(0.002, 0.06), (0.004, 0.03)])
def test_slow_steps_at_times_have_few_requests_refused(seconds: float, slow: float, clock: Clock) -> None:
    """A caller alone, with a timeout of 10 ms; one step in thirty takes far longer."""
    forecast, random, refused = Forecast(clock), np.random.default_rng(2), 0
    for _ in range(1000):
        if forecast.is_doubtful(1) or max(1.25, forecast.margin) * forecast.step(1) <= 0.01:
            took = slow if random.random() < 1 / 30 else seconds
            clock.now += took
            forecast.note(1, took)
        else:
            refused += 1
        clock.now += 0.01
    assert refused <= 20


def test_steps_that_always_take_too_long_are_tried_seldom(forecast: Forecast, clock: Clock) -> None:
    tried = 0
    for _ in range(1000):
        if forecast.is_doubtful(1) or forecast.margin * forecast.step(1) <= 0.01:
            tried += 1
            clock.now += 0.015
            forecast.note(1, 0.015)
        clock.now += 0.01
    assert tried <= 100
