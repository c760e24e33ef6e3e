"""Where the work of infer requests is done: large JSON has one thread, in which nobody else gets to run."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import TypeVar

T = TypeVar("T")

# Below this many bytes a thread hop costs more than the work.
INLINE_BYTES = 64 * 1024


_PAUSE_SECONDS = 20e-6  # longer than a thread that waits for the interpreter takes to get it


class Where(Enum):
    """On the event loop, in any thread, or in the one for JSON."""

    EVENT_LOOP = auto()
    ANY_THREAD = auto()
    JSON_THREAD = auto()


def thread_from(num_bytes: int) -> Where:
    """Where work on this many bytes, which are no JSON, is done."""
    return Where.ANY_THREAD if num_bytes > INLINE_BYTES else Where.EVENT_LOOP


def pause_for_others() -> None:
    """Let a thread that waits for the interpreter have it, without the 5 ms that Python makes it wait."""
    time.sleep(_PAUSE_SECONDS)


class Threads:
    """Large JSON holds the interpreter while it is parsed or written, up to tens of milliseconds.

    So this is done one by one, with a rest after each of as long as it took: others get half of the time.
    """

    def __init__(self) -> None:
        self._json = ThreadPoolExecutor(1, "expertd-json")
        self._rests_until = 0.0

    def run(
        self, where: Where, loop: asyncio.AbstractEventLoop, work: Callable[[], T]
    ) -> "asyncio.Future[T]":
        """The future result of `work` in a thread."""
        if where is Where.JSON_THREAD:
            return loop.run_in_executor(self._json, self._in_turn, work)
        return loop.run_in_executor(None, work)

    def _in_turn(self, work: Callable[[], T]) -> T:
        time.sleep(max(0.0, self._rests_until - time.perf_counter()))
        began = time.thread_time()
        try:
            return work()
        finally:
            self._rests_until = time.perf_counter() + time.thread_time() - began
