"""Work for the thread of the steps that must not overlap a step: loading, replacing SM partitions."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Jobs:
    """Those that wait, in their order. Who calls `add` or `next` holds the scheduler's lock."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], object], Future[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: Callable[[], T]) -> "Future[T]":
        """Let `job` wait; its result, or what it raised."""
        done: Future[T] = Future()
        self._waiting.append((job, done))
        return done

    def next(self) -> Callable[[], None] | None:
        """What runs the next one, which no longer waits; None if there is none."""
        return partial(_run, *self._waiting.popleft()) if self._waiting else None

    def cancel(self) -> None:
        """Cancel those that wait, once none is added any more."""
        for _, done in self._waiting:
            done.cancel()


def _run(job: Callable[[], object], done: Future[Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(job())
    except BaseException as error:
        done.set_exception(error)
