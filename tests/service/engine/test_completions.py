"""Reports are called on the event loop, or by the thread of the steps, however many wait."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from expertd.service.engine.completions import Completions
from expertd.service.engine.steps import Submission
from expertd.service.moe.request import zero_request
from tests.service.waiting import until


async def test_reports_may_be_left_to_another_thread() -> None:
    completions, seen = Completions(), list[int]()
    completions.leaves_reports = True
    completions.start()
    for number in range(100):
        completions.report_later(lambda number=number: seen.append(number))  # type: ignore[misc]
    completions.deliver_soon([])
    await asyncio.sleep(0.01)
    assert not seen
    assert completions.num_reports == 100
    assert completions.report_one()
    assert seen == [0]
    completions.flush()
    await until(lambda: len(seen) == 100)
    assert seen == list(range(100))
    assert not completions.report_one()


async def test_another_thread_may_take_the_last_report_at_any_time() -> None:
    class Taken(deque[Callable[[], None]]):
        """Its last report is taken by another thread as soon as somebody has seen that there is one."""

        def __bool__(self) -> bool:
            left = len(self)
            if left == 1:
                self.clear()
            return left > 0

    completions, seen = Completions(), list[int]()
    completions.start()
    completions._reports = Taken([lambda: None] * 9)
    completions.deliver([])
    await asyncio.sleep(0.01)
    completions._reports = deque([lambda: seen.append(1)])
    completions.deliver([])
    await until(lambda: seen == [1])


async def test_a_request_that_is_accepted_late_does_not_keep_the_event_loop_busy() -> None:
    """One between the last answer and the moment when the drain notices it."""
    completions, turns = Completions(), list[int]()
    completions.start()
    completions.accepted()
    drained = asyncio.ensure_future(completions.drained())
    await asyncio.sleep(0)
    completions.answered()
    completions.accepted()

    def answer() -> None:
        turns.append(1)
        completions.answered()

    asyncio.get_running_loop().call_later(0.01, answer)
    rescue = threading.Timer(10, completions.answered)  # else a busy loop would never end
    rescue.start()
    await drained
    rescue.cancel()
    assert turns


async def test_a_failed_report_is_told_to_the_event_loop() -> None:
    completions, told = Completions(), list[dict[str, Any]]()
    completions.start()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    completions.report_later(lambda: 1 // 0)  # type: ignore[arg-type]
    assert await asyncio.to_thread(completions.report_one)
    await until(lambda: bool(told))
    assert isinstance(told[0]["exception"], ZeroDivisionError)


async def test_two_threads_call_each_report_once_and_one_at_a_time() -> None:
    completions, seen, calling = Completions(), list[int](), list[int]()
    completions.start()

    def report(number: int) -> None:
        calling.append(number)
        seen.append(number)
        assert calling == [number]
        calling.clear()

    def call() -> None:
        while len(seen) < 3000:
            completions.report_one()

    failed = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    thread = threading.Thread(target=call)
    thread.start()
    for number in range(3000):
        completions.report_later(lambda number=number: report(number))  # type: ignore[misc]
        if number % 100 == 0:
            completions.flush()
            await asyncio.sleep(0)
    completions.flush()
    await until(lambda: len(seen) == 3000)
    thread.join()
    assert sorted(seen) == list(range(3000))
    assert not failed


async def test_a_request_that_cannot_be_answered_is_told_and_no_other_one_lost() -> None:
    completions, answered, told = Completions(), list[Any](), list[dict[str, Any]]()
    completions.start()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    def fail(answer: Any) -> None:
        raise OSError("not connected")

    request = zero_request(1, 128)
    pending = [Submission("tiny", request, done) for done in (answered.append, fail, answered.append)]
    for _ in pending:
        completions.accepted()
    completions.deliver([(each, b"output") for each in pending])
    assert answered == [b"output", b"output"]
    assert completions.unanswered == 0
    await until(lambda: bool(told))
    assert [(context["message"], str(context["exception"])) for context in told] == [
        ("a request could not be answered", "not connected")
    ]
