"""Torch's profiler around steps, and the Chrome trace of what it has recorded."""

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from expertd.service.engine.errors import (
    EngineError,
    ProfileRefusedError,
    StorageFullError,
    StorageUnavailableError,
)
from expertd.service.engine.profile_limits import MAX_BYTES
from expertd.service.engine.stream_marks import mark, with_stream_names
from expertd.service.util.files import NO_ROOM, UnwritableError, temporary_directory, temporary_folder

_END_BYTES = 8192  # of a trace: its last key, with the path of the file
_PROBE_BYTES = 1 << 16
_ROOM = "profile: expected room for the trace"
_THREAD_NAME = re.compile(rb'"thread (\d+) \([^"]*\)"')  # the profiler's: "thread 12 (python)"


def import_profiler() -> None:
    """Import what a `Recorder` needs, on any thread: about a second, the first time.

    Raises StorageFullError, StorageUnavailableError: without a folder for temporary files, which one of these
    imports asks for, too, there would be no trace.
    """
    try:
        temporary_directory("profile")
    except UnwritableError as error:
        raise storage_error(error) from error
    for name in ("torch.profiler", "torch._inductor.config"):  # the profiler asks the latter for CUDA graphs
        import_module(name)


class Recorder:
    """Records all threads of this process and its GPU. Start and stop it on one thread, between two steps.

    Without a GPU, make it on the thread that has imported torch: elsewhere, the profiler writes an error to
    stderr.
    """

    def __init__(self) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import profile

        from expertd.service.device.cuda import num_gpus

        # acc_events: or torch 2.11 warns that events of earlier cycles are gone; there is one cycle.
        config = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(experimental_config=config, acc_events=True)
        # With a GPU it loads CUPTI, for which the event loop should not wait: the worker thread does, and the
        # profiler writes one error.
        self._is_prepared = num_gpus() == 0
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
        """The Chrome trace; on any thread, after `stop`.

        Raises ProfileRefusedError for a large one, StorageFullError, StorageUnavailableError.

        threads  names, by the operating system's numbers
        """
        with _folder() as folder:
            file = folder / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            trace = _whole(file).replace(str(file).encode(), file.name.encode())

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


def storage_error(error: OSError) -> EngineError:
    """The error of a call whose file could not be written."""
    kind = StorageFullError if error.errno in NO_ROOM else StorageUnavailableError
    is_sentence = isinstance(error, UnwritableError)
    return kind(str(error) if is_sentence else f"{_ROOM}, got an error: {error.strerror}")


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the profiler's file. Raises StorageFullError, StorageUnavailableError."""
    try:
        with temporary_folder("profile") as folder:
            yield folder
    except OSError as error:
        raise storage_error(error) from error


def _whole(file: Path) -> bytes:
    """What the profiler has written. Raises ProfileRefusedError, and OSError unless it is whole.

    The profiler itself says nothing then, and leaves the beginning, in this file or in another.
    """
    if file.exists():
        check_size(file.stat().st_size)
        trace = file.read_bytes()
        if trace.rstrip().endswith(b"}") and b'"traceName"' in trace[-_END_BYTES:]:
            return trace
    begun = next(file.parent.iterdir(), file)
    try:
        with begun.open("ab") as rest:
            rest.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise UnwritableError(_ROOM, file.parent.parent, error) from error
    finally:
        with suppress(OSError):
            os.truncate(begun, 0)  # the profiler may keep it open, and its room
    raise UnwritableError(_ROOM, file.parent.parent, OSError(errno.EIO, os.strerror(errno.EIO)))


def check_size(num_bytes: int) -> None:
    """Raise ProfileRefusedError for more than MAX_BYTES."""
    if num_bytes > MAX_BYTES:
        expected = f"a trace of at most {MAX_BYTES} bytes"
        raise ProfileRefusedError(f"profile: expected {expected}, got {num_bytes}: record fewer steps")
