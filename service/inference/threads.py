"""Where the work of infer requests is done: large JSON is parsed on one thread, serialized."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import TypeVar

from expertd.service.engine.queue_counts import full_error
from expertd.service.settings.parts import Limits

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
        self._seconds = 0.0  # of one with its rest, smoothed
        self._length = 0  # of the line for JSON
        self._parsing = Counter[int]()  # requests in it that are not parsed yet, by caller

    def check_json(self, limits: Limits, caller: int) -> None:
        """Raise QueueFullError if too many requests wait to be parsed.

        A caller that has none there may have one: others do not shut it out.
        """
        waiting = self._parsing.total()
        if waiting < limits.max_queue_json or (caller and not self._parsing[caller]):
            return
        text = f"the line for JSON is full: {waiting} requests of at most {limits.max_queue_json} wait to be"
        hint = "parsed; send tensors in binary, with Inference-Header-Content-Length"
        raise full_error(limits, f"{text} {hint}", self._length * self._seconds)

    def parse(
        self, loop: asyncio.AbstractEventLoop, work: Callable[[], T], limits: Limits, caller: int
    ) -> "asyncio.Future[T]":
        """As `run` for a request's JSON. Raises as `check_json`."""
        self.check_json(limits, caller)
        self._parsing[caller] += 1
        future = self.run(Where.JSON_THREAD, loop, work)
        future.add_done_callback(lambda _: self._parsed(caller))
        return future

    def run(
        self, where: Where, loop: asyncio.AbstractEventLoop, work: Callable[[], T]
    ) -> "asyncio.Future[T]":
        """The future result of `work` in a thread."""
        if where is not Where.JSON_THREAD:
            return loop.run_in_executor(None, work)
        self._length += 1
        future = loop.run_in_executor(self._json, self._rested, work)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: object) -> None:
        self._length -= 1

    def _parsed(self, caller: int) -> None:
        self._parsing[caller] -= 1
        if not self._parsing[caller]:
            del self._parsing[caller]

    def _rested(self, work: Callable[[], T]) -> T:
        time.sleep(max(0.0, self._rests_until - time.perf_counter()))
        began = time.thread_time()
        try:
            return work()
        finally:
            took = time.thread_time() - began
            self._rests_until = time.perf_counter() + took
            self._seconds = 0.8 * self._seconds + 0.2 * 2 * took if self._seconds else 2 * took
