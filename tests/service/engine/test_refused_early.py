"""What is refused before it waits: for lack of room, or because its output would come too late."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from expertd.service.engine.errors import QueueFullError, TooManyRequestsError
from tests.service.engine.filled import Filled


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"max_queue_requests": 3}, "3 requests of at most 3 are waiting"),
        ({"max_queue_tokens": 40}, "40 tokens of at most 40 are waiting"),
    ],
)
def test_a_full_queue_has_room_for_one_request_of_each_other_key(limit: dict[str, int], text: str) -> None:
    filled = Filled(None, **limit)
    filled.add(32, 4, 4, caller=1)
    with pytest.raises(QueueFullError, match=text) as refused:
        filled.add(1, caller=1)
    assert refused.value.retry_after >= 1
    with pytest.raises(QueueFullError):
        filled.add(1)  # without a key, anybody may call, again and again
    for caller in (2, 3):
        filled.queues.check_room("0", 1, caller)
        filled.add(1, caller=caller)
        with pytest.raises(QueueFullError):
            filled.add(1, caller=caller)
    assert filled.queues["0"].num_requests == 5


def timed(models: Mapping[str, float] | None = None, unit: float = 1.0, **limits: int) -> Filled:
    """Queues of which a step of n tokens takes n seconds, or n of another unit."""
    filled = Filled(models, **limits)
    for model in filled.models:
        for tokens in (1, 32):
            filled.queues[model].forecast.note(tokens, tokens * unit)
    return filled


def admits(filled: Filled, timeout: float, size: int = 1, **request: Any) -> bool:
    """Whether a request is, which then waits."""
    try:
        filled.add(size, timeout=timeout, **request)
    except QueueFullError as error:
        return 0 < error.retry_after < timeout  # never: it says how long it would take
    return True


def test_a_request_that_would_be_answered_too_late_is_refused_at_once() -> None:
    filled = timed(prefill_chunk_tokens=0)
    filled.add(32, 16)  # as much will arrive before the second step, which then has 32
    assert not admits(filled, 1.2 * 64)
    assert filled.queues["0"].num_requests == 2
    assert admits(filled, 1.3 * 64)
    assert admits(filled, math.inf)
    steps = r"given the queue of model 0 and 1\.25 times what recent steps took"
    text = rf"^timeout: expected about \d+ microseconds, {steps}, got 1000000$"
    with pytest.raises(QueueFullError, match=text):
        filled.add(1, timeout=1.0)
    with pytest.raises(TooManyRequestsError):
        timed(queue_full_status=429).add(2, timeout=1.0)


def test_a_timeout_shorter_than_a_step_alone_is_not_asked_again() -> None:
    filled = timed()
    alone = "what recent steps take for this request alone"
    text = f"^timeout: expected about 16000000 microseconds, {alone}, got 15000000$"
    with pytest.raises(QueueFullError, match=text) as refused:
        filled.add(16, timeout=15.0)
    assert refused.value.retry_after == 0
    with pytest.raises(QueueFullError, match="given the queue") as refused:
        filled.add(16, timeout=17.0)
    assert refused.value.retry_after > 17, "a step may well take less"
    filled.queues["0"].forecast.note(32, 32 * 8)  # single steps take far longer: who knows
    with pytest.raises(QueueFullError, match="given the queue") as refused:
        filled.add(16, timeout=15.0)
    assert refused.value.retry_after > 15


def test_without_recent_steps_nothing_is_known() -> None:
    filled = Filled()
    filled.add(32, 32)
    assert admits(filled, 1e-3)


def test_an_idle_device_is_tried_again_soon() -> None:
    """Else one slow step would have all requests refused for a second, and the next would be as slow."""
    filled = timed()
    assert not admits(filled, 10.0, 32)
    filled.now += 0.11
    assert not admits(filled, 10.0, 32, busy=1.0)
    assert admits(filled, 10.0, 32)
    assert not admits(filled, 10.0, 32), "behind another one"
    step, late = filled.queues.split_late(filled.queues.next_step(), lambda: 0.0)
    assert len(step) == 1
    assert not late


def test_steps_that_run_count() -> None:
    assert admits(timed(), 20.0, busy=10.0)
    assert not admits(timed(), 10.0, busy=10.0)


def test_less_urgent_requests_do_not_count() -> None:
    filled = timed()
    filled.add(32, 32, priority=200)
    filled.add(16, priority=2)
    assert not admits(filled, 20.0)
    assert admits(filled, 20.0, priority=1)


def test_another_callers_turns_count_and_not_all_of_its_requests() -> None:
    filled = timed(prefill_chunk_tokens=0)
    filled.add(*[32] * 10, caller=1)
    assert not admits(filled, 300.0, caller=1)
    assert not admits(filled, 32.0, caller=2)
    assert admits(filled, 100.0, caller=2)


def test_another_caller_with_credit_comes_before_the_next_request() -> None:
    filled = timed(prefill_chunk_tokens=0)
    filled.add(*[4] * 100, caller=1)
    assert not admits(filled, 31.0 * 1.25, caller=2), "a step is filled with what waits"
    assert admits(filled, 33.0 * 1.25, caller=2)
    assert 2 in [chunk.submission.caller for chunk in filled.chunks()]
    filled.add(32, 1, caller=2)
    while 2 in [chunk.submission.caller for chunk in filled.chunks()]:
        pass
    assert not admits(filled, 100.0, caller=2), "its credit is used up"


@pytest.mark.parametrize("caller", [0, 1, 2])
def test_short_requests_wait_for_one_chunk_of_long_ones(caller: int) -> None:
    filled, ms = timed(unit=1e-3), 1.25e-3  # with the margin; more would arrive in whole seconds
    filled.add(32, 32, 32, 32, caller=1)
    assert not admits(filled, 0.9 * ms, caller=caller)
    assert admits(filled, 1.1 * ms, caller=caller), "the next step"
    assert filled.step() == [1]
    assert not admits(filled, 8.9 * ms, caller=caller)
    assert admits(filled, 9.1 * ms, caller=caller), "behind the chunk that is due"
    assert [filled.step(), filled.step()] == [[8], [1]]
    filled.add(*[8] * 8, caller=caller)
    three_steps = 8 + 32 + 8 + 32 + 8 + 1
    assert not admits(filled, (three_steps - 1) * ms, caller=caller)
    assert admits(filled, (three_steps + 20) * ms, caller=caller), "some more will arrive"


def test_short_requests_join_a_chunk() -> None:
    filled = timed(unit=1e-3, join_chunks=True)
    filled.add(32, 32)
    assert not admits(filled, 8.9 * 1.25e-3)
    assert admits(filled, 9.1 * 1.25e-3)
    assert filled.step() == [1, 8]


def test_a_refused_request_competes() -> None:
    """Else long ones would be computed whole, and there would never be time for it."""
    filled = timed()
    filled.add(32)
    whole = filled.queues.next_step()
    filled.add(32, 32)
    assert not admits(filled, 2.0, busy=32.0)
    filled.queues.end(whole[0], b"")
    assert filled.step() == [8]


def test_other_models_get_their_share_meanwhile() -> None:
    filled = timed({"0": 1.0, "1": 1.0})
    filled.add(*[32] * 10, model="1")
    assert not admits(filled, 1.2 * 20, 10)
    assert admits(filled, 1.3 * 20, 10)
    heavy = timed({"0": 1.0, "1": 3.0})
    heavy.add(*[32] * 10, model="1")
    assert not admits(heavy, 1.3 * 20, 10)


def test_a_step_leaves_out_what_it_would_answer_too_late() -> None:
    filled = Filled()
    (patient,), (hasty,) = filled.add(8, timeout=1000.0), filled.add(8, timeout=10.0)
    endless = filled.add(4, 4)
    for tokens in (1, 32):
        filled.queues["0"].forecast.note(tokens, tokens)
    step, late = filled.queues.split_late(filled.queues.next_step(), lambda: 0.0)
    assert [chunk.submission for chunk in step] == [patient, *endless]
    assert [chunk.submission for chunk in late] == [hasty]
    filled.add(8, timeout=1000.0)
    _, late = filled.queues.split_late(filled.queues.next_step(), lambda: 995.0)
    assert len(late) == 1, "what runs before it counts"


def test_a_request_that_had_ample_time_is_looked_at_once_half_of_it_has_passed() -> None:
    """Before, that would only cost time."""
    filled = Filled()
    filled.queues["0"].note(8, 1e-3)
    filled.add(8, timeout=10.0)
    for tokens in (1, 32):
        filled.queues["0"].forecast.note(tokens, 10 * tokens)  # as if it had become slow
    step = filled.queues.next_step()
    assert filled.queues.split_late(step, lambda: 1.0) == (step, [])
    filled.now += 11.0
    assert filled.queues.split_late(step, lambda: 1.0) == ([], step)
