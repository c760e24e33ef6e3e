"""Calls that wait for each other, in threads and in event loops."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from expertd_client import DeadlineError
from expertd_client.deadline import Deadline
from expertd_client.semaphore import Semaphore, Until, Waker
from expertd_client.steps import Steps, Work, run, run_async
from tests.programs import run as run_program


def test_at_most_so_many_threads_at_a_time() -> None:
    semaphore = Semaphore(3)
    inside = threading.Semaphore(3)

    def call() -> Steps[None]:
        yield from semaphore.acquire(Deadline(30))
        try:
            assert inside.acquire(blocking=False), "it was free"
            yield Work(lambda: None)
            inside.release()
        finally:
            semaphore.release()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(lambda: run(call())) for _ in range(2000)]:
            done.result()


async def test_tasks_go_on_in_the_order_of_their_calls() -> None:
    semaphore, order = Semaphore(1), list[int]()
    await run_async(semaphore.acquire(Deadline(30)))

    async def call(number: int) -> None:
        await run_async(semaphore.acquire(Deadline(30)))
        order.append(number)
        semaphore.release()

    tasks = [asyncio.create_task(call(number)) for number in range(5)]
    await asyncio.sleep(0)
    semaphore.release()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


async def test_a_task_that_is_cancelled_when_it_may_go_on_lets_the_next_one_through() -> None:
    semaphore = Semaphore(1)
    await run_async(semaphore.acquire(Deadline(30)))
    first, second = (asyncio.create_task(run_async(semaphore.acquire(Deadline(20)))) for _ in range(2))
    await asyncio.sleep(0)
    semaphore.release()
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_call_that_gives_up_holds_nothing(in_loop: bool) -> None:
    semaphore = Semaphore(1)

    def take(seconds: float) -> None:
        if in_loop:
            asyncio.run(run_async(semaphore.acquire(Deadline(seconds))))
        else:
            run(semaphore.acquire(Deadline(seconds)))

    take(1)
    with pytest.raises(DeadlineError, match=r"within 0\.02 s"):
        take(0.02)
    semaphore.release()
    take(1)


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_signal_that_was_set_before(in_loop: bool) -> None:
    signal = Waker()
    signal.set()
    wait = Until(signal, Deadline(1))
    assert asyncio.run(wait.in_loop()) if in_loop else wait.in_thread()


def test_a_call_of_the_parent_that_ends_in_a_forked_child_takes_nothing() -> None:
    semaphore = Semaphore(1)
    run(semaphore.acquire(Deadline(5)))
    call = semaphore.acquire(Deadline(5))
    next(call)
    semaphore.begin()
    call.close()
    run(semaphore.acquire(Deadline(5)))
    with pytest.raises(DeadlineError):
        run(semaphore.acquire(Deadline(0.01)))


FORK = """
import os
from expertd_client.deadline import Deadline
from expertd_client.steps import run
from expertd_client.semaphore import Semaphore

semaphore = Semaphore(1)
run(semaphore.acquire(Deadline(5)))
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    semaphore.release()
for _ in range(2):
    run(semaphore.acquire(Deadline(1)))
    semaphore.release()
"""


def test_a_forked_child_holds_nothing() -> None:
    run_program(FORK)
