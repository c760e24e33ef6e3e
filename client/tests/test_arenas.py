"""Places are shared, replaced by larger ones, and never used twice at the same time."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from expertd_client import arenas
from expertd_client.arenas import Arena, Holder, Later, Lease, Need, Opening, Sizes
from expertd_client.calls import layer_call
from expertd_client.deadline import Deadline
from expertd_client.device_memory import DeviceMemoryError
from expertd_client.directory import Directory, RefusedError, Wanted, largest
from expertd_client.errors import (
    DeadlineError,
    ExpertError,
    InvalidRequestError,
    ServerBusyError,
    TransportUnavailableError,
)
from expertd_client.leasing import take_place
from expertd_client.steps import Steps, Work, run, run_async
from expertd_client.transport import NotThisCallError


class Memory(Arena):
    """Remembers who uses which place."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.is_alive = True
        self.is_closed = False
        self.abandoned: list[int] = []
        self.answered: set[int] = set()
        self.in_use = [threading.Lock() for _ in range(sizes.num_places)]

    def is_usable(self) -> bool:
        return self.is_alive

    def abandon(self, place: int, request: int) -> None:
        self.abandoned.append(place)

    def reclaim(self) -> bool:
        for place in [place for place in self.abandoned if place in self.answered]:
            self.abandoned.remove(place)
            self.free.append(place)
        return not self.abandoned

    def close(self) -> None:
        assert not self.is_closed
        assert self.users == 0
        self.is_closed = True


def never() -> None:
    raise AssertionError("nothing to wake for")


def leased(holder: Holder[Memory], need: Need) -> Lease[Memory]:
    """A place, opening an arena if the holder asks for one."""
    found = holder.take(need, never)
    if isinstance(found, Opening):
        holder.opened(Memory(found.sizes[0]))
        found = holder.take(need, never)
    assert isinstance(found, Lease)
    return found


SMALL, LARGE = Need(1, 2048), Need(500, 500 * 2048)


def test_arenas_grow_to_powers_of_two_and_do_not_shrink() -> None:
    holder: Holder[Memory] = Holder(8)
    holder.enter()
    first = leased(holder, SMALL)
    assert first.arena.sizes == Sizes(16, 65536, 2)
    holder.give_back(first)
    second = leased(holder, LARGE)
    assert second.arena.sizes == Sizes(512, 512 * 2048, 2)
    assert first.arena.is_closed
    holder.give_back(second)
    assert leased(holder, SMALL).arena is second.arena


def test_an_arena_in_use_is_closed_after_its_last_call() -> None:
    holder: Holder[Memory] = Holder(8)
    first, other = leased(holder, SMALL), leased(holder, SMALL)
    assert first.place != other.place
    leased(holder, LARGE)
    assert first.arena.retired
    holder.give_back(first)
    assert not first.arena.is_closed
    holder.give_back(other)
    assert first.arena.is_closed


def test_there_are_more_places_if_more_calls_come_at_the_same_time() -> None:
    holder: Holder[Memory] = Holder(6)
    for _ in range(5):
        holder.enter()
    assert leased(holder, SMALL).arena.sizes.num_places == 6  # not 8
    lone: Holder[Memory] = Holder(6)
    lone.enter()
    places = [leased(lone, SMALL), leased(lone, SMALL)]
    lone.enter()
    lone.enter()
    assert leased(lone, SMALL).arena.sizes.num_places == 4
    for lease in places:
        lone.give_back(lease)
    assert places[0].arena.is_closed


def test_large_arenas_have_few_places() -> None:
    holder: Holder[Memory] = Holder(64)
    for _ in range(64):
        holder.enter()
    assert leased(holder, Need(4096, 100 << 20)).arena.sizes == Sizes(4096, 100 << 20, 2)
    woken: list[int] = []
    leased(holder, SMALL)
    assert holder.take(SMALL, lambda: woken.append(1)) == Later(None)
    assert woken == []


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


def test_an_abandoned_place_is_free_once_it_is_answered() -> None:
    holder: Holder[Memory] = Holder(1)
    lease = leased(holder, SMALL)
    holder.give_back(lease, 17)
    waits = holder.take(SMALL, lambda: None)
    assert isinstance(waits, Later)
    assert waits.seconds is not None  # nobody may be there to wake it
    lease.arena.answered.add(lease.place)
    assert holder.take(SMALL, never) == lease


def test_an_arena_that_is_gone_is_replaced() -> None:
    holder: Holder[Memory] = Holder(4)
    lease = leased(holder, SMALL)
    lease.arena.is_alive = False
    assert leased(holder, SMALL).arena is not lease.arena
    holder.give_back(lease)
    assert lease.arena.is_closed


def test_a_refusal_lasts_a_while_for_calls_of_that_size() -> None:
    holder: Holder[Memory] = Holder(4)
    lease = leased(holder, SMALL)
    assert isinstance(holder.take(LARGE, never), Opening)
    assert isinstance(holder.take(LARGE, lambda: None), Later)  # another thread is opening it
    assert holder.failed(LARGE, ServerBusyError("limit: expected room, got none", 503))
    with pytest.raises(NotThisCallError, match="expected room"):
        holder.take(LARGE, never)
    assert leased(holder, SMALL).arena is lease.arena


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
    assert isinstance(holder.take(SMALL, never), Opening)
    assert holder.failed(SMALL, error)
    now = time.monotonic()
    monkeypatch.setattr("expertd_client.arenas.time.monotonic", lambda: now + 0.9 * seconds)
    with pytest.raises(NotThisCallError):
        holder.take(SMALL, never)
    monkeypatch.setattr("expertd_client.arenas.time.monotonic", lambda: now + seconds)
    assert isinstance(holder.take(SMALL, never), Opening)


def test_no_more_places_are_asked_for_after_a_refusal() -> None:
    holder: Holder[Memory] = Holder(8)
    for _ in range(2):
        leased(holder, SMALL)
    for _ in range(4):
        holder.enter()
    assert isinstance(holder.take(SMALL, never), Opening)
    assert not holder.failed(SMALL, ServerBusyError("limit: expected room, got none", 503))
    assert holder.take(SMALL, lambda: None) == Later(None)


def test_a_closed_holder() -> None:
    holder: Holder[Memory] = Holder(4)
    lease = leased(holder, SMALL)
    woken: list[int] = []
    holder.close()
    assert not lease.arena.is_closed
    holder.give_back(lease)
    assert lease.arena.is_closed
    with pytest.raises(TransportUnavailableError):
        holder.take(SMALL, lambda: woken.append(1))


def test_places_are_never_shared_by_threads() -> None:
    """Calls of all sizes at the same time, some of which leave early."""
    holder: Holder[Memory] = Holder(5)
    made: list[Memory] = []

    def open_arena(opening: Opening) -> Steps[Memory]:
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


def test_waiting_for_a_place_ends_at_the_deadline() -> None:
    holder: Holder[Memory] = Holder(1)
    lease = leased(holder, SMALL)
    with pytest.raises(DeadlineError):
        run(take_place(holder, SMALL, Deadline(0.02), never))  # type: ignore[arg-type]
    holder.give_back(lease)
    assert run(take_place(holder, SMALL, Deadline(1), never)) == lease  # type: ignore[arg-type]


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
    assert await asyncio.wait_for(second, 5) == lease


async def test_a_call_that_is_cancelled_when_it_has_just_been_woken_wakes_the_next() -> None:
    holder: Holder[Memory] = Holder(1)
    lease = leased(holder, SMALL)
    steps = [take_place(holder, SMALL, Deadline(20), never) for _ in range(2)]  # type: ignore[arg-type]
    first, second = (asyncio.create_task(run_async(each)) for each in steps)
    await asyncio.sleep(0)
    holder.give_back(lease)
    first.cancel()
    assert await second == lease


class OnGpu:
    """As much of a tensor as tells where it is."""

    def __init__(self) -> None:
        self.device = type("device", (), {"type": "cuda", "index": 3})


def test_a_gpu_that_is_refused_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    def make(wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        yield Work(lambda: None)
        if wanted.gpu is not None:
            raise DeviceMemoryError("cuMemAlloc_v2: expected CUDA_SUCCESS, got status 2")
        return Memory(wanted.opening.sizes[0])

    directory = Directory("channel", 4, make, by_model=True)
    call = layer_call("m", np.zeros((1, 3), np.float32))
    object.__setattr__(call.inputs[0], "value", OnGpu())
    assert directory.gpu_for(call) == 3
    for _ in range(2):
        wanted = Wanted("m", SMALL, Opening((Sizes(1, 4096, 1),)), 3, Deadline(1))
        assert run(directory.open(wanted)) is None
    assert directory.gpu_for(call) is None
    text = "memory of GPU 3: cuMemAlloc_v2: expected CUDA_SUCCESS, got status 2; taking host memory"
    assert caplog.messages == [f"transport channel: {text}"]


def test_a_refused_arena_concerns_this_call() -> None:
    def make(wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        yield Work(lambda: None)
        raise RefusedError(ServerBusyError("limit: expected room, got none", 503))

    directory = Directory("channel", 4, make, by_model=True)
    wanted = Wanted("m", SMALL, Opening((Sizes(1, 4096, 1),)), None, Deadline(1))
    with pytest.raises(NotThisCallError) as caught:
        run(directory.open(wanted))
    assert isinstance(caught.value.error, ServerBusyError)


def test_a_freed_place_is_used_while_a_larger_arena_is_opened() -> None:
    holder: Holder[Memory] = Holder(8)
    leases = [leased(holder, SMALL), leased(holder, SMALL)]
    assert isinstance(holder.take(LARGE, never), Opening)
    woken: list[Need] = []
    for need in (LARGE, SMALL):
        assert isinstance(holder.take(need, lambda need=need: woken.append(need)), Later)  # type: ignore[misc]
    holder.give_back(leases[0])
    assert woken == [LARGE, SMALL], "the first one has to wait for the larger arena"
    assert isinstance(holder.take(SMALL, never), Lease)


class Limited:
    """Makes arenas as a server does that allows so many tokens and places, and no more."""

    def __init__(self, most_tokens: int, most_places: int) -> None:
        self.most_tokens, self.most_places = most_tokens, most_places
        self.asked: list[Sizes] = []
        self.made: list[Memory] = []
        self.directory = Directory("channel", 8, self._make, by_model=True)

    def _make(self, wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        return (yield from largest(wanted, self._one))

    def _one(self, sizes: Sizes) -> Steps[Memory]:
        self.asked.append(sizes)
        if sizes.max_tokens > self.most_tokens or sizes.num_places > self.most_places:
            raise RefusedError(InvalidRequestError("byte_size: expected less", 400))
        self.made.append(Memory(sizes))
        return self.made[-1]
        yield

    def call(self, num_tokens: int, num_threads: int, times: int) -> None:
        """Have calls answered, each in a few milliseconds."""
        call = layer_call("m", np.zeros((num_tokens, 8), np.float32))

        def exchange(*_: object) -> Steps[bool]:
            yield Work(lambda: time.sleep(0.005))
            return True

        def answer() -> None:
            run(self.directory.answer(call, Deadline(30), exchange))

        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(answer) for _ in range(times)]:
                done.result()


@pytest.mark.parametrize(("most_tokens", "most_places"), [(1000, 8), (1 << 20, 1), (1000, 1)])
def test_what_a_server_accepts_is_not_asked_for_again(most_tokens: int, most_places: int) -> None:
    server = Limited(most_tokens, most_places)
    server.call(600, num_threads=4, times=60)
    assert len(server.made) <= 2 if most_places > 1 else len(server.made) == 1
    assert len(server.asked) <= 6
    assert max(memory.sizes.num_places for memory in server.made) == min(4, most_places)


@pytest.mark.parametrize("num_tokens", [16, 600])
def test_an_arena_is_not_replaced_by_a_smaller_one(num_tokens: int) -> None:
    server = Limited(most_tokens=1000, most_places=4)
    server.call(16, num_threads=4, times=60)
    server.call(num_tokens, num_threads=8, times=60)  # 8 places are refused, and 1024 tokens
    assert server.made[-1].sizes.num_places == 4
    assert server.made[-1].sizes.max_tokens == num_tokens
    server.call(20, num_threads=4, times=60)
    assert server.made[-1].sizes.max_tokens >= num_tokens


def test_more_places_are_asked_for_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_MORE_PLACES_SECONDS", 0.2)
    server = Limited(most_tokens=1000, most_places=2)
    server.call(16, num_threads=8, times=60)
    assert server.made[-1].sizes.num_places == 2
    server.most_places = 8
    time.sleep(0.25)
    server.call(16, num_threads=8, times=60)
    assert server.made[-1].sizes.num_places == 8


def test_a_new_arena_may_have_more_places_than_the_lost_one() -> None:
    holder: Holder[Memory] = Holder(8)
    for _ in range(8):
        holder.enter()
    wanted = holder.take(SMALL, never)
    assert isinstance(wanted, Opening)
    holder.opened(Memory(replace(wanted.sizes[0], num_places=2)))
    lease = leased(holder, SMALL)
    lease.arena.is_alive = False
    holder.give_back(lease)
    assert holder.take(SMALL, never) == wanted


@pytest.mark.parametrize("room", [64, 5, 2])
def test_as_many_places_are_had_as_a_server_gives(room: int) -> None:
    holder: Holder[Memory] = Holder(256)
    first = leased(holder, SMALL)
    leased(holder, SMALL)
    for _ in range(100):
        holder.enter()
    wanted = holder.take(SMALL, never)
    assert isinstance(wanted, Opening)
    assert not wanted.is_needed
    assert {sizes.max_tokens for sizes in wanted.sizes} == {16}
    assert [sizes.num_places for sizes in wanted.sizes] == [128, 64, 32, 16, 8, 4]
    given = [sizes for sizes in wanted.sizes if sizes.num_places <= room]
    if given:
        holder.opened(Memory(given[0]))
    else:
        assert not holder.failed(SMALL, ServerBusyError("no room", 503))
        assert isinstance(holder.take(SMALL, lambda: None), Later), "and not again at once"
        holder.give_back(first)
    assert leased(holder, SMALL).arena.sizes.num_places == {64: 64, 5: 4, 2: 2}[room]


@pytest.mark.parametrize(
    "error",
    [
        RefusedError(InvalidRequestError("byte_size: expected less in all regions, got more", 400)),
        DeviceMemoryError("cuMemAlloc_v2: expected CUDA_SUCCESS, got status 2"),
        DeadlineError("late"),
        TransportUnavailableError("an answer without a channel"),
    ],
)
def test_calls_do_without_more_places(error: Exception) -> None:
    deadlines: list[float] = []

    def make(wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        yield Work(lambda: None)
        if not wanted.opening.is_needed:
            deadlines.append(wanted.deadline.seconds)
            raise error
        return Memory(wanted.opening.sizes[0])

    def exchange(*_: object) -> Steps[bool]:
        yield Work(lambda: time.sleep(0.01))
        return True

    directory = Directory("channel", 8, make, by_model=True)
    call = layer_call("m", np.zeros((1, 3), np.float32))
    object.__setattr__(call.inputs[0], "value", OnGpu())

    def answer() -> None:
        run(directory.answer(call, Deadline(30), exchange))

    answer()  # alone: more places are wanted later
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(answer) for _ in range(50)]:
            done.result()
    assert directory.gpu_for(call) == 3, "its memory is used"
    assert len(deadlines) == 1
    assert deadlines[0] <= 1, "calls wait for places, not for the server"


def test_smaller_memory_of_a_gpu_is_taken_if_there_is_no_more() -> None:
    def one(sizes: Sizes) -> Steps[Memory]:
        if sizes.num_places > 1:
            raise DeviceMemoryError("cuMemAlloc_v2: expected CUDA_SUCCESS, got status 2")
        return Memory(sizes)
        yield

    wanted = Wanted("m", SMALL, Opening((Sizes(16, 4096, 2), Sizes(1, 4096, 1))), 3, Deadline(1))
    assert run(largest(wanted, one)).sizes.num_places == 1


@pytest.mark.parametrize("error", [DeadlineError("late"), ServerBusyError("no room", 503)])
def test_an_arena_that_is_lost_while_more_places_are_refused_is_replaced(error: ExpertError) -> None:
    holder: Holder[Memory] = Holder(8)
    leases = [leased(holder, SMALL), leased(holder, SMALL)]
    for _ in range(3):
        holder.enter()
    wanted = holder.take(SMALL, never)
    assert isinstance(wanted, Opening)
    assert not wanted.is_needed
    leases[0].arena.is_alive = False
    assert isinstance(holder.take(SMALL, lambda: None), Later)
    assert not holder.failed(SMALL, error)
    wanted = holder.take(SMALL, never)
    assert isinstance(wanted, Opening)
    assert wanted.is_needed


def test_a_call_that_asks_for_more_places_has_its_own_deadline() -> None:
    def make(wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        while not wanted.opening.is_needed:
            wanted.deadline.check()
            yield Work(lambda: time.sleep(0.01))
        return Memory(wanted.opening.sizes[0])

    directory = Directory("channel", 8, make, by_model=True)
    holder = directory.holder("m", None)
    for number in range(2):
        wanted = holder.take(SMALL, never)
        if isinstance(wanted, Opening):
            run(directory.open(Wanted("m", SMALL, wanted, None, Deadline(30))))
            wanted = holder.take(SMALL, never)
        assert isinstance(wanted, Lease), number
    for _ in range(3):
        holder.enter()
    call = layer_call("m", np.zeros((1, 3), np.float32))
    with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        run(directory.answer(call, Deadline(0.1), lambda *_: None))  # type: ignore[arg-type]
