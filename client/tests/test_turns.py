"""Calls that wait for their turn, in threads and in event loops."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from expertd_client import DeadlineError
from expertd_client.deadline import Deadline
from expertd_client.steps import Steps, Work, run, run_async
from expertd_client.turns import Signal, Turns, Until
from tests.programs import run as run_program


def test_at_most_so_many_threads_at_a_time() -> None:
    turns = Turns(3)
    inside = threading.Semaphore(3)

    def call() -> Steps[None]:
        yield from turns.take(Deadline(30))
        try:
            assert inside.acquire(blocking=False), "a turn was free"
            yield Work(lambda: None)
            inside.release()
        finally:
            turns.give_back()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(lambda: run(call())) for _ in range(2000)]:
            done.result()


async def test_tasks_take_turns_in_the_order_of_their_calls() -> None:
    turns, order = Turns(1), list[int]()
    await run_async(turns.take(Deadline(30)))

    async def call(number: int) -> None:
        await run_async(turns.take(Deadline(30)))
        order.append(number)
        turns.give_back()

    tasks = [asyncio.create_task(call(number)) for number in range(5)]
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


async def test_a_task_that_is_cancelled_when_it_is_its_turn_hands_it_on() -> None:
    turns = Turns(1)
    await run_async(turns.take(Deadline(30)))
    first, second = (asyncio.create_task(run_async(turns.take(Deadline(20)))) for _ in range(2))
    await asyncio.sleep(0)
    turns.give_back()
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_call_that_gives_up_is_not_handed_a_turn(in_loop: bool) -> None:
    turns = Turns(1)

    def take(seconds: float) -> None:
        if in_loop:
            asyncio.run(run_async(turns.take(Deadline(seconds))))
        else:
            run(turns.take(Deadline(seconds)))

    take(1)
    with pytest.raises(DeadlineError, match=r"within 0\.02 s"):
        take(0.02)
    turns.give_back()
    take(1)


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_signal_that_was_set_before(in_loop: bool) -> None:
    signal = Signal()
    signal.set()
    wait = Until(signal, Deadline(1))
    assert asyncio.run(wait.in_loop()) if in_loop else wait.in_thread()


def test_a_call_of_the_parent_that_ends_in_a_forked_child_takes_nothing() -> None:
    turns = Turns(1)
    run(turns.take(Deadline(5)))
    call = turns.take(Deadline(5))
    next(call)
    turns.begin()
    call.close()
    run(turns.take(Deadline(5)))
    with pytest.raises(DeadlineError):
        run(turns.take(Deadline(0.01)))


FORK = """
import os
from expertd_client.deadline import Deadline
from expertd_client.steps import run
from expertd_client.turns import Turns

turns = Turns(1)
run(turns.take(Deadline(5)))
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    turns.give_back()
for _ in range(2):
    run(turns.take(Deadline(1)))
    turns.give_back()
"""


def test_a_forked_child_has_all_turns() -> None:
    run_program(FORK)
