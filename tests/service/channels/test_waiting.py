"""The order of requests that wait for room in a channel, and how many may."""

from dataclasses import dataclass
from typing import Any

import pytest

from expertd.service.channels.waiting import QueueKey, WaitingCalls
from expertd.service.engine.errors import QueueFullError, TooManyRequestsError
from expertd.service.engine.queue_counts import Backlog, QueueCounts, num_cells
from tests.service.apps import MODEL, tiny_settings

LIMITS = {
    "max_request_tokens": 64,
    "max_batch_tokens": 64,
    "prefill_chunk_tokens": 16,
    "max_queue_tokens": 512,
    "max_queue_requests": 64,
}
LANES = {"decode_max_tokens": 4, "decode_batch_tokens": 64}


@dataclass(eq=False)
class Call:
    kind: QueueKey
    caller: int
    left: int


class Waits:
    """Requests that wait with these settings, and the order in which they leave."""

    def __init__(self, **changes: Any) -> None:
        limits = {**LIMITS, **changes.pop("limits", {})}
        models = [MODEL, {**MODEL, "name": "other", "weight": 4.0}]
        cells = [0.0] * 3 * num_cells(2)
        self.engine, self.counts, self.other = (QueueCounts(cells, 2, row) for row in range(3))
        self.calls: WaitingCalls[Call] = WaitingCalls(
            tiny_settings(limits, models=models, **changes), self.counts
        )

    @property
    def totals(self) -> list[Backlog]:
        return [self.counts.total(model, 0) for model in range(2)]

    def put(self, caller: int = 0, num_tokens: int = 1, priority: int = 128, model: str = "tiny") -> Call:
        call = Call(self.calls.kind(model, num_tokens, priority), caller, num_tokens)
        self.calls.put(call)
        return call

    def order(self) -> list[Call]:
        return [self.take() for _ in range(len(self.calls))]

    def take(self) -> Call:
        """The next one, which is sent at once."""
        call = self.calls.take()
        self.calls.sent(call)
        return call


def test_models_leave_in_proportion_to_their_weights() -> None:
    waits = Waits()
    for _ in range(12):
        waits.put(model="tiny")
        waits.put(model="other")
    first = [call.kind.model for call in waits.order()[:10]]
    assert (first.count("tiny"), first.count("other")) == (2, 8)


def test_a_model_that_had_no_requests_has_no_claim_to_the_time_before() -> None:
    waits = Waits()
    for _ in range(9):
        waits.put(model="tiny")
    for _ in range(6):
        waits.take()
    for _ in range(9):
        waits.put(model="other")
    assert [call.kind.model for call in waits.order()[:10]].count("tiny") == 2


def test_short_requests_do_not_wait_for_all_long_ones() -> None:
    waits = Waits()
    for _ in range(4):
        waits.put(num_tokens=32)
    for _ in range(64 - 4):
        waits.put(num_tokens=1)
    order = [call.left for call in waits.order()]
    assert order.index(1) <= 1
    assert order[:36].count(32) == 2, "half of the tokens"


def test_those_unlike_all_in_the_channel_may_leave_before_others() -> None:
    waits = Waits()
    for caller in (1, 1, 2, 3):
        waits.put(caller)
    urgent = waits.put(1, priority=1)
    like = [waits.calls.kind("tiny", 1, priority) for priority in (128, 1)]
    waits.calls.in_channel.update({(like[0], 1): 1, (like[0], 3): 1})
    assert waits.calls.take_unlike() is urgent
    waits.calls.sent(urgent)
    second = waits.calls.take_unlike()
    assert second is not None
    waits.calls.sent(second)
    assert second.caller == 2
    assert waits.calls.take_unlike() is None
    assert [call.caller for call in waits.order()] == [1, 3, 1], "the others have their turns"


def test_what_is_removed_does_not_leave() -> None:
    waits = Waits()
    kept, removed = waits.put(1), waits.put(2, 17)
    waits.calls.remove(removed)
    assert waits.totals == [Backlog(1, 1), Backlog(0, 0)]
    assert waits.order() == [kept]
    assert waits.totals == [Backlog(0, 0)] * 2


def test_as_many_requests_wait_as_the_limits_allow() -> None:
    waits = Waits(limits={"max_queue_requests": 2, "queue_full_status": 429})
    for _ in range(2):
        waits.calls.check_capacity("tiny", 1, 0)
        waits.put()
    text = "^the queue of model tiny is full: 2 requests of at most 2 are waiting$"
    with pytest.raises(TooManyRequestsError, match=text) as raised:
        waits.calls.check_capacity("tiny", 1, 0)
    assert raised.value.retry_after >= 1
    with pytest.raises(TooManyRequestsError, match=text):
        waits.put()
    waits.put(model="other")
    waits.take()
    waits.put()
    assert waits.totals == [Backlog(2, 2), Backlog(1, 1)]


def test_a_caller_without_requests_is_not_shut_out() -> None:
    waits = Waits(limits={"max_queue_requests": 1})
    waits.put(caller=1)
    waits.calls.check_capacity("tiny", 1, 2)
    waits.put(caller=2)
    for caller in (0, 1, 2):
        with pytest.raises(QueueFullError):
            waits.calls.check_capacity("tiny", 1, caller)


def test_what_waits_in_other_processes_counts() -> None:
    waits = Waits(limits={"max_queue_requests": 4})
    waits.put(caller=1)
    waits.other.add(0, 0, 1, 60)
    waits.calls.check_capacity("tiny", 1, 0)
    waits.engine.set(0, 0, Backlog(2, 128, 1.5))
    text = "^the queue of model tiny is full: 4 requests of at most 4 are waiting$"
    with pytest.raises(QueueFullError, match=text) as raised:
        waits.calls.check_capacity("tiny", 1, 0)
    assert raised.value.retry_after == 6, "189 tokens are three steps of 64 and 1.5 seconds, and one runs"
    waits.engine.set(0, 0, Backlog(2, 128, 1.5, 32))
    with pytest.raises(QueueFullError, match=text) as raised:
        waits.calls.check_capacity("tiny", 1, 0)
    assert raised.value.retry_after == 11, "on a lane, whose steps have 32 tokens, they are six"
    with pytest.raises(QueueFullError):
        waits.put(caller=1)
    waits.put(caller=2)
    waits.other.clear()
    waits.engine.set(0, 0, Backlog(0, 0, 1.5))
    waits.put(caller=1)
    waits.put(model="other")


def test_a_caller_with_requests_in_the_channel_is_refused() -> None:
    waits = Waits()
    waits.engine.set(0, 0, Backlog(64, 64))
    waits.calls.check_capacity("tiny", 1, 2)
    waits.calls.in_channel[waits.calls.kind("other", 1, 128), 2] += 1
    waits.calls.check_capacity("tiny", 1, 2)
    waits.calls.in_channel[waits.calls.kind("tiny", 1, 1), 2] += 1
    waits.calls.check_capacity("tiny", 1, 2)  # it may be in a step
    waits.calls.in_channel[waits.calls.kind("tiny", 32, 1), 2] += 1
    with pytest.raises(QueueFullError):
        waits.calls.check_capacity("tiny", 1, 2)


def test_each_lane_has_the_limits() -> None:
    waits = Waits(limits={"max_queue_requests": 1}, lanes=LANES)
    waits.put(num_tokens=5)
    with pytest.raises(QueueFullError):
        waits.calls.check_capacity("tiny", 5, 0)
    waits.calls.check_capacity("tiny", 4, 0)
    waits.put(num_tokens=4)
    with pytest.raises(QueueFullError):
        waits.calls.check_capacity("tiny", 4, 0)
