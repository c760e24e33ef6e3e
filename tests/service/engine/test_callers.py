"""Callers share a lane by deficit round robin in tokens."""

from collections import Counter

from expertd.service.engine.callers import Lane
from expertd.service.engine.chunks import begin_chunk
from expertd.service.engine.steps import Pending
from tests.service.runners import layer_request


def pending(caller: int, num_tokens: int) -> Pending:
    return Pending("0", layer_request([0.0] * num_tokens), lambda _: None, False, caller=caller)


def taken(lane: Lane, num_tokens: int = 0) -> tuple[int, int]:
    """(caller, tokens) of the next request, of which a step takes `num_tokens`; 0: all."""
    head = lane.head()
    count = num_tokens or head.left
    lane.take(count)
    begin_chunk(head, count)
    return head.caller, count


def test_a_callers_requests_keep_their_order() -> None:
    lane = Lane(8)
    given = [pending(1, size) for size in (3, 8, 1, 8)]
    for each in given:
        lane.put(each)
    assert lane.num_requests == 4
    assert [taken(lane)[1] for _ in given] == [3, 8, 1, 8]
    assert lane.num_requests == 0


def test_callers_take_turns() -> None:
    lane = Lane(8)
    for caller in (1, 1, 1, 2, 2, 3):
        lane.put(pending(caller, 1))
    assert [taken(lane)[0] for _ in range(6)] == [1, 2, 3, 1, 2, 1]


def test_callers_get_equal_tokens_whatever_the_size_of_their_requests() -> None:
    lane, tokens = Lane(8), Counter[int]()
    sizes = {1: 8, 2: 1, 3: 5}
    for caller, size in sizes.items():
        for _ in range(400 // size):
            lane.put(pending(caller, size))
    for _ in range(240):
        caller, count = taken(lane)
        tokens[caller] += count
    assert max(tokens.values()) - min(tokens.values()) <= 2 * 8, tokens


def test_a_caller_that_returns_at_once_keeps_its_debt() -> None:
    """Its queue is empty whenever a step has begun, but another request comes before the next one."""
    lane, order = Lane(8), []
    for _ in range(3):
        lane.put(pending(2, 8))
    for _ in range(6):
        lane.put(pending(1, 8))
        order.append(taken(lane)[0])
    assert order == [2, 1, 2, 1, 2, 1]


def test_a_small_request_comes_before_those_of_a_caller_with_debts() -> None:
    lane = Lane(8)
    for _ in range(3):
        lane.put(pending(1, 8))
    assert taken(lane) == (1, 8)
    lane.put(pending(2, 1))
    assert [taken(lane) for _ in range(3)] == [(2, 1), (1, 8), (1, 8)]


def test_a_request_in_chunks_stays_the_next_one_while_its_caller_has_credit() -> None:
    lane = Lane(8)
    lane.put(pending(1, 8))
    lane.put(pending(2, 8))
    assert [taken(lane, 3), taken(lane, 3), taken(lane), taken(lane)] == [(1, 3), (1, 3), (1, 2), (2, 8)]


def test_a_removed_request_is_not_taken() -> None:
    lane = Lane(8)
    one, two, three = pending(1, 8), pending(2, 8), pending(1, 8)
    for each in (one, two, three):
        lane.put(each)
    assert taken(lane) == (1, 8)
    for each in (three, two):  # without credit, and with
        lane.remove(each)
    assert lane.num_requests == 0
    lane.put(pending(2, 1))
    lane.put(pending(1, 1))
    assert [taken(lane), taken(lane)] == [(2, 1), (1, 1)]


def test_callers_that_are_square_are_forgotten() -> None:
    lane = Lane(8)
    for caller in range(1000):
        lane.put(pending(caller, 1))
        taken(lane)
    for _ in range(20):
        lane.put(pending(-1, 8))
        taken(lane)
    assert len(lane._callers) <= 2
