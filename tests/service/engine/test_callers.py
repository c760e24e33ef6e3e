"""Callers share a queue by deficit round robin in tokens."""

from collections import Counter

import numpy as np
import pytest

from expertd.service.engine.callers import FairQueue
from expertd.service.engine.chunks import begin_chunk
from expertd.service.engine.steps import Submission
from tests.service.runners import layer_request


def pending(caller: int, num_tokens: int) -> Submission:
    request = Submission("0", layer_request([0.0] * num_tokens), lambda _: None, caller=caller)
    request.is_long = True  # steps may take parts of it
    return request


def taken(queue: FairQueue[Submission], num_tokens: int = 0) -> tuple[int, int]:
    """(caller, tokens) of the next request, of which a step takes `num_tokens`; 0: all."""
    head = queue.head()
    count = num_tokens or head.left
    queue.take(count)
    begin_chunk(head, count)
    return head.caller, count


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ([(1, 3), (1, 8), (1, 1), (1, 8)], [0, 1, 2, 3]),
        ([(1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (3, 1)], [0, 3, 5, 1, 4, 2]),
    ],
    ids=["requests keep their order", "callers take turns"],
)
def test_the_order_of_requests(given: list[tuple[int, int]], order: list[int]) -> None:
    queue = FairQueue[Submission](8)
    for each in given:
        queue.put(pending(*each))
    assert queue.num_requests == len(given)
    assert [taken(queue) for _ in given] == [given[index] for index in order]
    assert queue.num_requests == 0


def test_callers_get_equal_tokens_whatever_the_size_of_their_requests() -> None:
    queue, tokens = FairQueue[Submission](8), Counter[int]()
    sizes = {1: 8, 2: 1, 3: 5}
    for caller, size in sizes.items():
        for _ in range(400 // size):
            queue.put(pending(caller, size))
    for _ in range(240):
        caller, count = taken(queue)
        tokens[caller] += count
    assert max(tokens.values()) - min(tokens.values()) <= 2 * 8, tokens


def test_a_caller_that_returns_at_once_keeps_its_debt() -> None:
    """Its queue is empty whenever a step has begun, but another request comes before the next one."""
    queue, order = FairQueue[Submission](8), []
    for _ in range(3):
        queue.put(pending(2, 8))
    for _ in range(6):
        queue.put(pending(1, 8))
        order.append(taken(queue)[0])
    assert order == [2, 1, 2, 1, 2, 1]


def test_a_small_request_comes_before_those_of_a_caller_with_debts() -> None:
    queue = FairQueue[Submission](8)
    for _ in range(3):
        queue.put(pending(1, 8))
    assert taken(queue) == (1, 8)
    queue.put(pending(2, 1))
    assert [taken(queue) for _ in range(3)] == [(2, 1), (1, 8), (1, 8)]


def test_a_request_in_chunks_stays_the_next_one_while_its_caller_has_credit() -> None:
    queue = FairQueue[Submission](8)
    queue.put(pending(1, 8))
    queue.put(pending(2, 8))
    assert [taken(queue, 3), taken(queue, 3), taken(queue), taken(queue)] == [(1, 3), (1, 3), (1, 2), (2, 8)]


def test_a_removed_request_is_not_taken() -> None:
    queue = FairQueue[Submission](8)
    one, two, three = pending(1, 8), pending(2, 8), pending(1, 8)
    for each in (one, two, three):
        queue.put(each)
    assert taken(queue) == (1, 8)
    for each in (three, two):  # without credit, and with
        queue.remove(each)
    assert queue.num_requests == 0
    queue.put(pending(2, 1))
    queue.put(pending(1, 1))
    assert [taken(queue), taken(queue)] == [(2, 1), (1, 1)]


def test_whole_requests_are_taken_in_the_same_order() -> None:
    chance = np.random.default_rng()
    given = [(int(chance.integers(3)), int(chance.integers(1, 9))) for _ in range(60)]
    one, other = FairQueue[Submission](8), FairQueue[Submission](8)
    for caller, size in given:
        one.put(pending(caller, size))
        other.put(pending(caller, size))
    while one.num_requests:
        room = int(chance.integers(30))
        step, left = one.take_whole(room, True)
        assert step
        assert [(each.caller, each.left) for each in step] == [taken(other) for _ in step]
        assert left == room - sum(each.left for each in step)
        assert left >= 0 or len(step) == 1
        assert not one.num_requests or one.head().left > left, "else it fits, too"
        if left >= 0 and one.num_requests:
            assert one.take_whole(left, False) == ([], left)
    assert other.num_requests == 0


def test_callers_that_are_square_are_forgotten() -> None:
    queue = FairQueue[Submission](8)
    for caller in range(1000):
        queue.put(pending(caller, 1))
        taken(queue)
    for _ in range(20):
        queue.put(pending(-1, 8))
        taken(queue)
    assert len(queue._callers) <= 2
