"""Places are shared, replaced by larger ones, and never used twice at the same time."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from expertd_client.arenas import ArenaOpening, Holder, Later, Need
from expertd_client.deadline import Deadline
from expertd_client.errors import (
    DeadlineError,
    ExpertError,
    InvalidRequestError,
    ServerBusyError,
)
from expertd_client.leasing import take_place
from expertd_client.steps import Steps, Work, run, run_async
from expertd_client.transport import NotThisCallError
from tests.arenas import SMALL, Memory, leased, never


def test_a_place_that_is_given_back_wakes_one_that_waits() -> None:
    holder: Holder[Memory] = Holder(1)
    lease = leased(holder, SMALL)
    woken: list[str] = []
    calls = [lambda name=name: woken.append(name) for name in "abc"]
    for call in calls:
        assert isinstance(holder.take(SMALL, call), Later)
    holder.forget(calls[0])
    holder.give_back(lease)
    assert woken == ["b"]
    holder.forget(calls[1])  # it had been woken, but has gone
    assert woken == ["b", "c"]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (InvalidRequestError("byte_size: expected at most 1, got 2", 400), 5.0),
        (ServerBusyError("server: expected a loaded one, got one that is loading", 503), 0.25),
        (ServerBusyError("limit: expected room, got none", 503, retry_after=1.0), 1.0),
        (ServerBusyError("limit: expected room, got none", 503, retry_after=60.0), 5.0),
    ],
)
def test_a_busy_server_is_asked_again_sooner(
    error: ExpertError, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder: Holder[Memory] = Holder(4)
    assert isinstance(holder.take(SMALL, never), ArenaOpening)
    holder.failed(SMALL, error)
    now = time.monotonic()
    monkeypatch.setattr("expertd_client.arenas.time.monotonic", lambda: now + 0.9 * seconds)
    with pytest.raises(NotThisCallError):
        holder.take(SMALL, never)
    monkeypatch.setattr("expertd_client.arenas.time.monotonic", lambda: now + seconds)
    assert isinstance(holder.take(SMALL, never), ArenaOpening)


def test_places_are_never_shared_by_threads() -> None:
    """Calls of all sizes at the same time, some of which leave early."""
    holder: Holder[Memory] = Holder(5)
    made: list[Memory] = []

    def open_arena(opening: ArenaOpening) -> Steps[Memory]:
        made.append((yield Work(lambda: Memory(opening.sizes[0]))))
        holder.opened(made[-1])
        return made[-1]

    def call(number: int) -> None:
        need = Need(1 + number * 37 % 400, (1 + number * 37 % 400) * 2048)
        holder.enter()
        try:
            lease = run(take_place(holder, need, Deadline(30), open_arena))
            assert lease is not None
            assert lease.arena.sizes.hold(need)
            assert lease.arena.in_use[lease.place].acquire(blocking=False), "the place was free"
            lease.arena.in_use[lease.place].release()
            if number % 11 == 0:
                holder.give_back(lease, number)
                lease.arena.answered.add(lease.place)
            else:
                holder.give_back(lease)
        finally:
            holder.leave()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(call, range(3000)))
    holder.close()
    assert all(memory.is_closed for memory in made)


async def test_a_call_that_gives_up_does_not_keep_an_abandoned_place_from_the_next() -> None:
    holder: Holder[Memory] = Holder(1)
    lease = leased(holder, SMALL)
    steps = [take_place(holder, SMALL, Deadline(seconds), never) for seconds in (0.05, 20)]  # type: ignore[arg-type]
    first, second = (asyncio.create_task(run_async(each)) for each in steps)
    await asyncio.sleep(0)
    holder.give_back(lease, 1)
    with pytest.raises(DeadlineError):
        await first
    lease.arena.answered.add(lease.place)
    assert await asyncio.wait_for(second, 60) == lease


async def test_a_call_that_is_cancelled_when_it_has_just_been_woken_wakes_the_next() -> None:
    holder: Holder[Memory] = Holder(1)
    lease = leased(holder, SMALL)
    steps = [take_place(holder, SMALL, Deadline(20), never) for _ in range(2)]  # type: ignore[arg-type]
    first, second = (asyncio.create_task(run_async(each)) for each in steps)
    await asyncio.sleep(0)
    holder.give_back(lease)
    first.cancel()
    assert await second == lease


@pytest.mark.parametrize("error", [DeadlineError("late"), ServerBusyError("no room", 503)])
def test_an_arena_that_is_lost_while_more_places_are_refused_is_replaced(error: ExpertError) -> None:
    holder: Holder[Memory] = Holder(8)
    leases = [leased(holder, SMALL), leased(holder, SMALL)]
    for _ in range(3):
        holder.enter()
    wanted = holder.take(SMALL, never)
    assert isinstance(wanted, ArenaOpening)
    assert not wanted.is_needed
    leases[0].arena.is_alive = False
    assert isinstance(holder.take(SMALL, lambda: None), Later)
    holder.failed(SMALL, error)
    wanted = holder.take(SMALL, never)
    assert isinstance(wanted, ArenaOpening)
    assert wanted.is_needed
