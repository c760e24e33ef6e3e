"""Records steps with torch's profiler, while the server serves: a Chrome trace, which Perfetto opens."""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expertd.service.engine.errors import ProfileRefusedError, ProfileUnavailableError
from expertd.service.engine.lanes import AnyScheduler

MAX_STEPS, MAX_SECONDS, MAX_BYTES = 256, 60.0, 64 * 1024 * 1024
_LOOK_SECONDS = 0.005


class Profiling:
    """One recording at a time; it costs every step time meanwhile.

    num_steps  counts the steps that have ended, of all models
    about      is written into the trace: what else is known of the server
    """

    def __init__(
        self, scheduler: AnyScheduler, num_steps: Callable[[], int], about: Callable[[], dict[str, Any]]
    ) -> None:
        self._scheduler, self._num_steps, self._about = scheduler, num_steps, about
        self._is_running = False

    async def record(self, steps: int, seconds: float) -> bytes:
        """The next `steps` steps, or those of `seconds` if they are fewer, as JSON.

        Raises ProfileUnavailableError, and ProfileRefusedError if it has more than MAX_BYTES.
        """
        if self._is_running:
            raise ProfileUnavailableError("profile: expected none to be recorded, got one that is")
        self._is_running = True
        try:
            return await self._record(steps, seconds)
        finally:
            self._is_running = False

    async def _record(self, steps: int, seconds: float) -> bytes:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        worker = self._scheduler.lanes[0]  # the profiler starts and stops on one thread
        recording = profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        await worker.between_steps(recording.start)
        try:
            first, end = self._num_steps(), time.monotonic() + seconds
            while self._num_steps() < first + steps and time.monotonic() < end:
                await asyncio.sleep(_LOOK_SECONDS)
            about = {"steps": self._num_steps() - first, **self._about()}
            recording.add_metadata_json("expertd", json.dumps(about))
        finally:
            await worker.between_steps(recording.stop)
        return await asyncio.to_thread(_exported, recording)


def _exported(recording: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recording.export_chrome_trace(str(file))
        if (size := file.stat().st_size) > MAX_BYTES:
            expected = f"a trace of at most {MAX_BYTES} bytes"
            raise ProfileRefusedError(f"profile: expected {expected}, got {size}: record fewer steps")
        return file.read_bytes()
