"""Records steps with torch's profiler, while the server serves: a Chrome trace, which Perfetto opens."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from expertd.service.engine.errors import ProfileUnavailableError
from expertd.service.engine.executor import Executor
from expertd.service.engine.joint_trace import joint
from expertd.service.engine.recorder import Recorder, check_size, import_profiler
from expertd.service.settings.lanes import LANES

_LOOK_SECONDS = 0.005


class Recordings(Protocol):
    """Implemented by `expertd.service.ranks.recording.RankRecordings`, which says more."""

    def begin(self) -> None: ...
    def check(self) -> None: ...
    def end(self) -> None: ...
    def events(self, base: int, /) -> Sequence[bytes]: ...


@dataclass(frozen=True)
class Recording:
    """A Chrome trace as JSON, the number of steps that ended in it, and the seconds that it took."""

    trace: bytes
    steps: int
    seconds: float


class Profiling:
    """One recording at a time; it costs every step time meanwhile.

    num_steps  counts the steps that have ended, of all models
    about      is written into the trace: what else is known of the server
    streams    the GPU's streams, with their names; called on the thread of the steps
    ranks      the ranks that run the steps, and record them, too; None: this process runs them
    """

    def __init__(
        self,
        executor: Executor,
        num_steps: Callable[[], int],
        about: Callable[[], dict[str, Any]],
        streams: Callable[[], Iterable[tuple[str, Any]]] = tuple,
        ranks: Callable[[], Recordings | None] = lambda: None,
    ) -> None:
        self._executor, self._num_steps, self._about = executor, num_steps, about
        self._streams, self._ranks = streams, ranks
        self._is_running = False

    async def record(
        self, steps: int, seconds: float, run: Callable[[], Awaitable[None]] | None = None
    ) -> Recording:
        """The next `steps` steps, or those of `seconds` seconds if they are fewer.

        run  what runs the steps, from when they are recorded; None: the server's callers do

        Raises ProfileUnavailableError, ProfileRefusedError if the trace has more than MAX_BYTES,
        DeviceLostError if a rank is lost, and what `run` raises.
        """
        if self._is_running:
            raise ProfileUnavailableError("profile: expected none to be recorded, got one that is")
        self._is_running = True
        try:
            return await self._record(steps, seconds, run)
        finally:
            self._is_running = False

    async def _record(
        self, steps: int, seconds: float, run: Callable[[], Awaitable[None]] | None
    ) -> Recording:
        executor = self._executor  # whose first thread the profiler starts and stops on
        await asyncio.to_thread(import_profiler)
        recorder, ranks = Recorder(), self._ranks()
        num_steps, taken, has_begun = 0, 0.0, False

        def begin() -> None:
            nonlocal has_begun
            recorder.start(self._streams())
            if ranks is not None:
                try:
                    ranks.begin()
                except BaseException:
                    recorder.stop()
                    raise
            has_begun = True

        def end() -> None:
            if not has_begun:
                return
            recorder.stop({"steps": num_steps, **self._about()})
            if ranks is not None:
                ranks.end()

        begun = executor.do_between_steps(begin)
        try:
            await asyncio.wrap_future(begun)
            first, began = self._num_steps(), time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    if run is not None:
                        await run()
                    while self._num_steps() < first + steps:  # they are counted a little later
                        if ranks is not None:
                            ranks.check()
                        await asyncio.sleep(_LOOK_SECONDS)
            num_steps, taken = self._num_steps() - first, time.monotonic() - began
        finally:
            begun.cancel()  # unless it runs, or has run: then `end` comes after it, also if nobody waits
            await asyncio.shield(asyncio.wrap_future(executor.do_between_steps(end)))
        trace = await asyncio.to_thread(_trace, recorder, self._threads(), ranks)
        return Recording(trace, num_steps, taken)

    def _threads(self) -> dict[int | None, str]:
        """The names of the threads that run steps, by the operating system's numbers."""
        lanes = self._executor.lanes
        names = [f"{name} lane" for name in LANES] if len(lanes) > 1 else ["worker"]
        threads: dict[int | None, str] = {}
        for lane, name in zip(lanes, names, strict=True):  # one thread may run both
            known = threads.get(lane.thread_id)
            threads[lane.thread_id] = f"{known}, {name}" if known else name
        return {**threads, threading.get_native_id(): "event loop"}


def _trace(recorder: Recorder, threads: Mapping[int | None, str], ranks: Recordings | None) -> bytes:
    own = recorder.trace(threads)
    if ranks is None:
        return own
    trace = joint(own, "front end", ranks.events)
    check_size(len(trace))
    return trace
