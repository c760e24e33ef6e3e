"""Calls as steps, written once for threads and for event loops.

A call is a generator that yields whatever it waits for, and is resumed with what that gave or raised. `run`
waits in this thread, `run_async` in the event loop.
"""

import asyncio
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from expertd_client.deadline import Deadline

T = TypeVar("T")


class Wait(Protocol):
    """Something to wait for; either way gives, or raises, the same."""

    def in_thread(self) -> object:
        """Block this thread."""

    async def in_loop(self) -> object:
        """Leave the event loop to others."""


Steps: TypeAlias = Generator[Wait, Any, T]
"""A call in progress that returns T."""


def run(steps: Steps[T]) -> T:
    """The result of a call, which waits in this thread."""
    try:
        wait = next(steps)
        while True:
            try:
                given = wait.in_thread()
            except BaseException as error:
                wait = steps.throw(error)
            else:
                wait = steps.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def run_async(steps: Steps[T]) -> T:
    """The result of a call, which waits in the running event loop."""
    try:
        wait = next(steps)
        while True:
            try:
                given = await wait.in_loop()
            except BaseException as error:
                wait = steps.throw(error)
            else:
                wait = steps.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result


@dataclass(slots=True)
class Work:
    """Something that may take a moment; gives what it returns."""

    run: Callable[[], object]

    def in_thread(self) -> object:
        """Do it."""
        return self.run()

    async def in_loop(self) -> object:
        """Do it in a thread."""
        return await asyncio.to_thread(self.run)


@dataclass(slots=True)
class Sleep:
    """For `seconds`, at most until the deadline. Raises DeadlineError if that has passed before."""

    seconds: float
    deadline: Deadline

    def in_thread(self) -> None:
        """As Wait.in_thread."""
        time.sleep(min(self.seconds, self.deadline.check()))

    async def in_loop(self) -> None:
        """As Wait.in_loop."""
        await asyncio.sleep(min(self.seconds, self.deadline.check()))


async def settled(ready: "asyncio.Future[T]", seconds: float, otherwise: T) -> T:
    """The result of a future, which is `otherwise` after `seconds` (math.inf: never)."""
    timer = None
    if not math.isinf(seconds):
        timer = asyncio.get_running_loop().call_later(seconds, settle, ready, otherwise)
    try:
        return await ready
    finally:
        if timer is not None:
            timer.cancel()


def settle(ready: "asyncio.Future[T]", result: T) -> None:
    """Give a future its result, unless it has one or is cancelled."""
    if not ready.done():
        ready.set_result(result)
