"""Work for the thread of the steps that must not overlap a step: loading, replacing SM partitions."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

JOB_SECONDS = 120.0
"""What a job may take, unless a step may take more: to capture a layer's graphs, or to start the profiler."""


class Jobs:
    """Those that wait, in their order. Callers of all methods but `goes_on` hold the queues' lock.

    in_flight  a number of the one that runs, None: there is none; and the seconds that it may take
    """

    def __init__(self) -> None:
        self.in_flight: tuple[int | None, float] = None, 0.0
        self._number = 0
        self._running: Future[Any] | None = None
        self._error: Exception | None = None  # of all further ones
        self._waiting: deque[tuple[Callable[[], object], Future[Any], float]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: Callable[[], T], may_take: float) -> "Future[T]":
        """Let `job` wait; its result, or what it raised."""
        done: Future[T] = Future()
        if self._error is None:
            self._waiting.append((job, done, may_take))
        else:
            done.set_exception(self._error)
        return done

    def next(self) -> Callable[[], None] | None:
        """What runs the next one that is not cancelled, which no longer waits; None if there is none."""
        while self._waiting:
            job, done, may_take = self._waiting.popleft()
            if done.set_running_or_notify_cancel():
                self._running = done
                return partial(self._run, job, done, may_take)
        return None

    def goes_on(self) -> None:
        """The one that runs has done a part, and the time that it may take begins again; called by it."""
        if self._running is not None:
            self._number += 1
            self.in_flight = self._number, self.in_flight[1]

    def cancel(self) -> None:
        """Cancel those that wait, once none is added any more."""
        for _, done, _ in self._waiting:
            done.cancel()

    def give_up(self, error: Exception) -> None:
        """Have all end with `error`: those that wait, that are added later, and that which runs."""
        self._error = error
        ended = [done for _, done, _ in self._waiting]
        self._waiting.clear()
        if self._running is not None:
            ended.append(self._running)
        for done in ended:
            with suppress(InvalidStateError):  # it has ended, or is cancelled
                done.set_exception(error)

    def _run(self, job: Callable[[], object], done: Future[Any], may_take: float) -> None:
        self._number += 1
        self.in_flight = self._number, may_take
        error: BaseException | None = None
        result: object = None
        try:
            result = job()
        except BaseException as raised:
            error = raised
        self.in_flight, self._running = (None, 0.0), None  # before anybody hears of its end
        with suppress(InvalidStateError):  # given up
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)
