"""Calls that wait for each other, in threads and in event loops."""

import asyncio
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from expertd_client.deadline import Deadline
from expertd_client.steps import Steps, settle, settled


class Waker:
    """Wakes the one call that waits for it. Set once, from any thread or from the event loop that waits."""

    __slots__ = ("is_set", "lock", "ready")

    def __init__(self) -> None:
        self.is_set = False
        self.lock = threading.Lock()  # held until it is set
        self.lock.acquire()
        self.ready: asyncio.Future[bool] | None = None

    def set(self) -> None:
        """Wake the call."""
        self.is_set = True
        if self.ready is not None:
            settle(self.ready, True)
        self.lock.release()


@dataclass(slots=True)
class Until:
    """Until a signal is set, which it then gives; False: after `seconds`, or at the deadline.

    Raises DeadlineError if that has passed before.
    """

    signal: Waker
    deadline: Deadline
    seconds: float | None = None

    def in_thread(self) -> bool:
        """As Wait.in_thread."""
        return self.signal.lock.acquire(timeout=min(self._left(), threading.TIMEOUT_MAX))

    async def in_loop(self) -> bool:
        """As Wait.in_loop."""
        if self.signal.is_set:
            return True
        self.signal.ready = asyncio.get_running_loop().create_future()
        return await settled(self.signal.ready, self._left(), False)

    def is_over(self) -> bool:
        """As Wait.is_over."""
        return self.signal.is_set or self.deadline.remaining() <= 0

    def _left(self) -> float:
        left = self.deadline.check()
        return left if self.seconds is None else min(left, self.seconds)


class Semaphore:
    """At most `count` calls of this process at a time; others wait, and the first of them is next."""

    _left: int
    _lock: threading.Lock
    _waiting: deque[Waker]

    def __init__(self, count: int) -> None:
        self._count = count
        self.begin()
        _all.add(self)

    def acquire(self, deadline: Deadline) -> Steps[None]:
        """Wait until fewer than `count` calls hold it. Raises DeadlineError."""
        with self._lock:
            if self._left:
                self._left -= 1
                return
            signal = Waker()
            self._waiting.append(signal)
        has_it = False
        try:
            has_it = yield Until(signal, deadline)
        finally:
            if not has_it:
                self._forget(signal)
        if not has_it:
            raise deadline.error()

    def release(self) -> None:
        """Let the next call go on."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:  # after a fork, it may have been the parent's
                self._left = min(self._left + 1, self._count)

    def begin(self) -> None:
        """Without any calls: those before a fork are the parent's."""
        self._left = self._count
        self._lock = threading.Lock()
        self._waiting = deque()

    def _forget(self, signal: Waker) -> None:
        """A call does not wait any more; it may have been let through at the last moment."""
        with self._lock:
            if not signal.is_set:
                with suppress(ValueError):  # after a fork, the child's queue is empty
                    self._waiting.remove(signal)
                return
        self.release()


_all: "weakref.WeakSet[Semaphore]" = weakref.WeakSet()


def _begin_in_child() -> None:
    for semaphore in list(_all):
        semaphore.begin()


os.register_at_fork(after_in_child=_begin_in_child)
