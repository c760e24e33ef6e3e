"""Records steps with torch's profiler, while the server serves: a Chrome trace, which Perfetto opens."""

import asyncio
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertd.service.engine.errors import ProfileRefusedError, ProfileUnavailableError
from expertd.service.engine.lanes import AnyScheduler
from expertd.service.engine.profile_limits import MAX_BYTES
from expertd.service.engine.stream_marks import mark, with_stream_names
from expertd.service.settings.lanes import LANES

_LOOK_SECONDS = 0.005
_THREAD_NAME = re.compile(rb'"thread (\d+) \([^"]*\)"')  # the profiler's: "thread 12 (python)"


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
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        num_steps: Callable[[], int],
        about: Callable[[], dict[str, Any]],
        streams: Callable[[], Iterable[tuple[str, Any]]] = tuple,
    ) -> None:
        self._scheduler, self._num_steps, self._about = scheduler, num_steps, about
        self._streams = streams
        self._is_running = False

    async def record(
        self, steps: int, seconds: float, run: Callable[[], Awaitable[None]] | None = None
    ) -> Recording:
        """The next `steps` steps, or those of `seconds` seconds if they are fewer.

        run  what runs the steps, from when they are recorded; None: the server's callers do

        Raises ProfileUnavailableError, ProfileRefusedError if the trace has more than MAX_BYTES, and what
        `run` raises.
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
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        worker = self._scheduler.lanes[0]  # the profiler starts and stops on one thread
        # acc_events: or torch 2.11 warns that events of earlier cycles are gone; there is one cycle.
        config = _ExperimentalConfig(profile_all_threads=True)
        profiler = profile(experimental_config=config, acc_events=True)
        await worker.between_steps(profiler.start)
        try:
            await worker.between_steps(lambda: mark(self._streams()))
            first, begin = self._num_steps(), time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    if run is not None:
                        await run()
                    while self._num_steps() < first + steps:  # they are counted a little later
                        await asyncio.sleep(_LOOK_SECONDS)
            num_steps, taken = self._num_steps() - first, time.monotonic() - begin
            profiler.add_metadata_json("expertd", json.dumps({"steps": num_steps, **self._about()}))
        finally:
            await worker.between_steps(profiler.stop)
        trace = await asyncio.to_thread(_exported, profiler, self._threads())
        return Recording(trace, num_steps, taken)

    def _threads(self) -> dict[int | None, str]:
        """The names of the threads that run steps, by the operating system's numbers."""
        lanes = self._scheduler.lanes
        names = [f"{name} lane" for name in LANES] if len(lanes) > 1 else ["worker"]
        threads = {lane.thread_id: name for lane, name in zip(lanes, names, strict=True)}
        return {**threads, threading.get_native_id(): "event loop"}


def _exported(profiler: Any, threads: Mapping[int | None, str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        if (size := file.stat().st_size) > MAX_BYTES:
            expected = f"a trace of at most {MAX_BYTES} bytes"
            raise ProfileRefusedError(f"profile: expected {expected}, got {size}: record fewer steps")
        trace = file.read_bytes()

    missing = dict(threads)

    def named(found: re.Match[bytes]) -> bytes:
        missing.pop(number := int(found[1]), None)
        name = threads.get(number)
        return found[0] if name is None else f'"{name} (thread {number})"'.encode()

    trace = _THREAD_NAME.sub(named, trace)
    # The profiler leaves out threads now and then.
    events = [
        {"name": "thread_name", "ph": "M", "ts": 0, "pid": os.getpid(), "tid": number}
        | {"args": {"name": f"{name} (thread {number})"}}
        for number, name in missing.items()
    ]
    before, key, after = trace.partition(b'"traceEvents": [')
    more = b"".join(json.dumps(event).encode() + b"," for event in events)
    return with_stream_names(before + key + more + after)
