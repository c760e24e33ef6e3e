"""Torch's profiler around steps, and the Chrome trace of what it has recorded."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from expertd.service.engine.errors import ProfileRefusedError
from expertd.service.engine.profile_limits import MAX_BYTES
from expertd.service.engine.stream_marks import mark, with_stream_names

_THREAD_NAME = re.compile(rb'"thread (\d+) \([^"]*\)"')  # the profiler's: "thread 12 (python)"


def import_profiler() -> None:
    """Import what a `Recorder` needs, on any thread: about a second, the first time."""
    for name in ("torch.profiler", "torch._inductor.config"):  # the profiler asks the latter for CUDA graphs
        import_module(name)


class Recorder:
    """Records all threads of this process and its GPU. Start and stop it on one thread, between two steps.

    Without a GPU, make it on the thread that has imported torch: elsewhere, the profiler writes an error to
    stderr.
    """

    def __init__(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        # acc_events: or torch 2.11 warns that events of earlier cycles are gone; there is one cycle.
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(experimental_config=config, acc_events=True)
        # With a GPU it loads CUPTI, for which the event loop should not wait: the worker thread does, and the
        # profiler writes one error.
        self._is_prepared = not torch.cuda.is_available()
        if self._is_prepared:
            self._profiler.prepare_trace()

    def start(self, streams: Iterable[tuple[str, Any]]) -> None:
        """Record from now on. streams: the GPU's, with their names."""
        if self._is_prepared:
            self._profiler.start_trace()
        else:
            self._profiler.start()
        mark(streams)

    def stop(self, about: Mapping[str, Any] | None = None) -> None:
        """Record no more. about: written into the trace."""
        if about is not None:
            self._profiler.add_metadata_json("expertd", json.dumps(about))
        self._profiler.stop()

    def trace(self, threads: Mapping[int | None, str]) -> bytes:
        """The Chrome trace; on any thread, after `stop`. Raises ProfileRefusedError for a large one.

        threads  names, by the operating system's numbers
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(file))
            check_size(file.stat().st_size)
            trace = file.read_bytes().replace(str(file).encode(), file.name.encode())

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


def check_size(num_bytes: int) -> None:
    """Raise ProfileRefusedError for more than MAX_BYTES."""
    if num_bytes > MAX_BYTES:
        expected = f"a trace of at most {MAX_BYTES} bytes"
        raise ProfileRefusedError(f"profile: expected {expected}, got {num_bytes}: record fewer steps")
