"""Recordings of ranks' steps: each rank records its own, and the front end joins them to one trace."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import IO, Any

from expertd.service.engine.errors import (
    ProfileRefusedError,
    StorageFullError,
    StorageUnavailableError,
)
from expertd.service.engine.joint_trace import of_process
from expertd.service.engine.loading import LoadedLayers
from expertd.service.engine.recorder import Recorder, check_size, import_profiler, storage_error
from expertd.service.ranks import setup as words
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.messages import ERROR_BYTES

logger = logging.getLogger(__name__)

_KINDS = {kind.__name__: kind for kind in (StorageFullError, StorageUnavailableError)}


class RankRecorder:
    """For a rank: does what RECORD messages ask for, and answers them.

    do_between_steps  has the thread of the steps do something
    say               tells the front end that it is done: the kind of an error and its text, or ""
    """

    def __init__(
        self,
        rank: int,
        loaded: LoadedLayers,
        do_between_steps: Callable[[Callable[[], None]], None],
        say: Callable[[str], None],
    ) -> None:
        self._rank, self._loaded = rank, loaded
        self._do_between_steps, self._say = do_between_steps, say
        self._recorder: Recorder | None = None
        self._is_recording = False

    def handle(self, message: Sequence[Any], write: Callable[[Callable[[], bytes]], None]) -> None:
        """Do what a message asks for, of which this is all but the first word; steps go on meanwhile.

        write  takes what returns the trace, or raises
        """
        match message:
            case [words.BEGIN]:
                self._do_between_steps(lambda: self._answer(self._begin))
            case [words.END]:
                self._do_between_steps(lambda: self._answer(self.end))
            case [words.TRACE, int(base)]:
                export = partial(self._answer, lambda: write(partial(self._events, base)))
                threading.Thread(target=export, name="expertd-trace", daemon=True).start()
            case _:
                raise ValueError(f"recording: expected one of the messages of a front end, got {message}")

    def end(self) -> None:
        """Record no more, between two steps; nothing happens if it does not."""
        if self._recorder is not None and self._is_recording:
            self._recorder.stop()
        self._is_recording = False

    def _begin(self) -> None:
        self.end()
        import_profiler()
        self._recorder = Recorder()
        self._recorder.start(self._loaded.streams())
        self._is_recording = True

    def _events(self, base: int) -> bytes:
        """What was recorded, once, for `joint`. Raises ProfileRefusedError."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            expected = "a recording, got none: the rank has been started meanwhile"
            raise ProfileRefusedError(f"profile: expected {expected}")
        trace = recorder.trace({threading.main_thread().native_id: "steps"})
        return of_process(trace, f"rank {self._rank}", self._rank + 1, base)

    def _answer(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            logger.debug("recording failed", exc_info=error)
            self._say(said(error))
        else:
            self._say("")


class RankRecordings:
    """For the front end: one recording at a time of all ranks that run steps.

    group  the ranks that run steps; raises DeviceLostError
    """

    def __init__(self, group: Callable[[], RankGroup]) -> None:
        self._present = group
        self._group: RankGroup | None = None

    def begin(self) -> None:
        """Record from now on; on the thread of the steps, between two. Raises DeviceLostError."""
        self._group = self._present()
        errors = self._group.record({}, words.RECORD, words.BEGIN)
        if any(errors.values()):
            self.end()
            _refuse(errors)

    def check(self) -> None:
        """On any thread, while ranks record. Raises DeviceLostError: these steps will not come."""
        assert self._group is not None
        self._group.check()

    def end(self) -> None:
        """Record no more; as `begin`. Raises DeviceLostError."""
        assert self._group is not None
        self._group.record({}, words.RECORD, words.END)

    def events(self, base: int) -> list[bytes]:
        """What each rank has recorded; on any thread. Raises DeviceLostError, ProfileRefusedError."""
        assert self._group is not None
        with ExitStack() as stack:
            files = {rank.number: stack.enter_context(_memory_file()) for rank in self._group.ranks}
            numbers = {rank: file.fileno() for rank, file in files.items()}
            _refuse(self._group.record(numbers, words.RECORD, words.TRACE, base))
            check_size(sum(os.fstat(number).st_size for number in numbers.values()))
            return [_content(file) for file in files.values()]


def write_trace(descriptor: int, trace: Callable[[], bytes]) -> None:
    """Write a file of the front end's, and close it, also if there is no trace."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(trace())


def said(error: Exception) -> str:
    """An error for the front end."""
    error = storage_error(error) if isinstance(error, OSError) else error
    return f"{type(error).__name__}: {error}"[:ERROR_BYTES]


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("expertd-trace"), "w+b")


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _refuse(errors: Mapping[int, str]) -> None:
    for rank, error in sorted(errors.items()):
        if error:
            kind, _, text = error.partition(": ")
            raise _KINDS.get(kind, ProfileRefusedError)(f"rank {rank}: {text or kind}")
