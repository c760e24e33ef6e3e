"""Requests take the server's slots in turn, whenever the answers come."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from expertd_client import Channel, ServerUnreachableError
from expertd_client.arenas import Holder, Lease, Need
from expertd_client.calls import layer_call
from expertd_client.channel import base
from expertd_client.channel.arena import ChannelArena
from expertd_client.channel.transport import _exchange
from expertd_client.channel.waiting import AnswerWait
from expertd_client.deadline import Deadline
from expertd_client.steps import Sleep
from tests.by_hand import HIDDEN, ChannelByHand

NEED = Need(1, 64)
CALL = layer_call("m", np.zeros((1, HIDDEN), np.float32))


@pytest.fixture
def by_hand() -> Iterator[ChannelByHand]:
    server = ChannelByHand(num_slots=2)
    yield server
    server.close()
    server.link.close()


def lease_of(holder: Holder[ChannelArena]) -> Lease[ChannelArena]:
    found = holder.take(NEED, lambda: None)
    assert isinstance(found, Lease)
    return found


def test_a_call_takes_the_slot_of_one_whose_caller_has_gone(by_hand: ChannelByHand) -> None:
    holder: Holder[ChannelArena] = Holder(2)
    holder.opened(ChannelArena(by_hand.opened, holder))
    left: list[int] = []
    lease = lease_of(holder)
    steps = _exchange(CALL, Deadline(1), lease, left)
    next(steps)
    steps.close()
    holder.give_back(lease, *left)

    lease = lease_of(holder)
    steps = _exchange(CALL, Deadline(1), lease, [])
    next(steps)
    by_hand.answer(2)
    with pytest.raises(StopIteration):
        next(steps)
    holder.give_back(lease)

    steps = _exchange(CALL, Deadline(1), lease_of(holder), [])
    assert isinstance(next(steps), Sleep), "the slot of the first request, which has no answer"
    by_hand.answer(1)
    assert isinstance(next(steps), AnswerWait)
    assert by_hand.sent(3)


def test_a_call_that_waits_for_a_slot_learns_that_the_channel_has_ended(by_hand: ChannelByHand) -> None:
    holder: Holder[ChannelArena] = Holder(2)
    holder.opened(ChannelArena(by_hand.opened, holder))
    first = _exchange(CALL, Deadline(30), lease_of(holder), [])
    next(first)
    lease = lease_of(holder)
    steps = _exchange(CALL, Deadline(30), lease, [])
    next(steps)
    by_hand.answer(2)
    with pytest.raises(StopIteration):
        next(steps)
    holder.give_back(lease)
    steps = _exchange(CALL, Deadline(math.inf), lease_of(holder), [])
    assert isinstance(next(steps), Sleep)
    by_hand.close()
    with pytest.raises(ServerUnreachableError, match="the server has closed it"):
        next(steps)


def test_times_are_those_of_the_slots_last_request(by_hand: ChannelByHand) -> None:
    link = by_hand.link
    for sequence in (1, 2):
        link.send(bytes(8))
        by_hand.answer(sequence, queue_ns=1000 * sequence)
        link.take_answer(sequence)
    assert link.times(1) == (1e-6, 0.0)
    link.send(bytes(8))  # in the slot of the first
    assert link.times(1) is None
    assert link.times(2) == (2e-6, 0.0)


@pytest.mark.parametrize("ends", ["closed by both", "forgotten", "answered"])
def test_memory_of_a_device_is_kept_while_a_step_may_use_it(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(base, "_kept", kept)
    server = ChannelByHand(num_slots=2, on_device=True)
    channel = Channel(server.made())
    ticket = channel.submit(channel.slots[0], 1, timeout=math.inf, synchronize=False)
    if ends == "closed by both":
        server.close()  # while its step goes on
        with pytest.raises(ServerUnreachableError):
            channel.wait(ticket)
        channel.close()
    elif ends == "answered":
        server.answer(1)
        channel.wait(ticket)
    del channel
    assert server.link.is_closed
    assert [each is server.device for each in kept] == ([] if ends == "answered" else [True])
    server.close()
