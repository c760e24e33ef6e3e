"""Calls as steps, written once for threads and for event loops.

A call is a generator that yields whatever it waits for, and is resumed with what that gave or raised. `run`
waits in this thread, `run_async` in the event loop.
"""

import asyncio
import math
import time
from collections.abc import Callable, Generator
from contextlib import suppress
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

    def is_over(self) -> bool:
        """Whether there is nothing to wait for: `in_thread` would do its work, or raise, at once."""


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


class Begun:
    """A call whose steps are taken as far as nothing is to be waited for, and later to its end."""

    def __init__(self, steps: Steps[object]) -> None:
        self._steps = steps
        self._wait: Wait | None = Work(lambda: None)

    @property
    def is_done(self) -> bool:
        """Whether it has returned."""
        return self._wait is None

    def begin(self) -> Steps[None]:
        """Go on until it would have to wait. Raises what the call does."""
        while self._wait is not None and self._wait.is_over():
            yield from self._step(self._wait)

    def finish(self) -> Steps[None]:
        """Go on until it has returned. Raises what the call does."""
        while self._wait is not None:
            yield from self._step(self._wait)

    def close(self) -> None:
        """Give it up, unless it has returned."""
        self._wait = None
        self._steps.close()

    def _step(self, wait: Wait) -> Steps[None]:
        try:
            given = yield wait
        except BaseException as error:
            self._resume(self._steps.throw, error)
        else:
            self._resume(self._steps.send, given)

    def _resume(self, resume: Callable[[Any], Wait], given: object) -> None:
        self._wait = None
        with suppress(StopIteration):
            self._wait = resume(given)


def as_work(steps: Steps[T]) -> Steps[T]:
    """A call, no wait of which is put off: others may depend on it."""
    try:
        wait = next(steps)
        while True:
            try:
                given = yield _Now(wait)
            except BaseException as error:
                wait = steps.throw(error)
            else:
                wait = steps.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result


class _Now:
    """A wait that is work."""

    def __init__(self, wait: Wait) -> None:
        self.in_thread, self.in_loop = wait.in_thread, wait.in_loop

    def is_over(self) -> bool:
        return True


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

    def is_over(self) -> bool:
        """As Wait.is_over."""
        return True


class Sleep:
    """For `seconds`, at most until the deadline. Raises DeadlineError if that has passed before."""

    __slots__ = ("_until", "seconds")

    def __init__(self, seconds: float, deadline: Deadline) -> None:
        self.seconds = min(seconds, deadline.check())
        self._until = time.monotonic() + self.seconds

    def in_thread(self) -> None:
        """As Wait.in_thread."""
        time.sleep(self._left())

    async def in_loop(self) -> None:
        """As Wait.in_loop."""
        await asyncio.sleep(self._left())

    def is_over(self) -> bool:
        """As Wait.is_over."""
        return not self._left()

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())


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
