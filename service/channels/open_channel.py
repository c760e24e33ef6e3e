"""A channel's memory, descriptors and slots, from its opening to its release."""

import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from expertd.service.channels.geometry import Geometry
from expertd.service.channels.memory import DataRegion, SealedMemory
from expertd.service.channels.requests import Line, RequestReader
from expertd.service.engine.errors import EngineError, QueueTimeoutError
from expertd.service.engine.executor import Executor
from expertd.service.engine.metrics.requests import StageSeconds
from expertd.service.engine.refusals import Reason
from expertd.service.engine.steps import Submission
from expertd.service.moe.request import LayerRequest, Signal
from expertd_client.channel.layout import (
    ANNOUNCED_OFFSET,
    ANSWER_OFFSET,
    HEADER_BYTES,
    SLOT_BYTES,
    WORD_BYTES,
)

_ANNOUNCED = ANNOUNCED_OFFSET // WORD_BYTES


class Answered(NamedTuple):
    """A request that has been answered; reason: None for status 200, seconds: since it was read, and
    their stages.

    model is "" if the request names none of the channel's several models.
    """

    model: str
    sequence: int
    status: int
    reason: Reason | None
    text: str
    seconds: float
    stages: StageSeconds
    num_tokens: int | None  # None: not known, because the request is invalid


class ChannelOwner(Protocol):
    """Where a channel reports to, from any thread."""

    def answered(self, channel: "OpenChannel", answer: Answered) -> None: ...

    def broken(self, channel: "OpenChannel", why: str) -> None:
        """The caller broke the protocol; the channel takes no more requests, and must be closed."""

    def idle(self, channel: "OpenChannel") -> None:
        """No step uses the closed channel any more: `release` may be called."""

    def expire_at(self, channel: "OpenChannel", when: float) -> None:
        """`expire` must be called at `when`, by `time.perf_counter`, and not at the time told before."""


class ClosedError(Exception):
    """The channel was closed, or the request cancelled, before the request's step."""


class ChannelProtocolError(Exception):
    """The caller broke the protocol; the text says how."""


class Memory(NamedTuple):
    """What caller and server share: the control memory, and the data region that requests lie in."""

    geometry: Geometry
    control: SealedMemory
    region: DataRegion

    def close(self) -> None:
        """End the device's access to both; no step uses them any more."""
        self.region.close()
        self.control.close()


class SlotState:
    """The state of one slot. `data` and `line` are its latest valid request line."""

    __slots__ = (
        "data",
        "deadline",
        "expired",
        "line",
        "on_stream",
        "recurs",
        "says_ok",
        "sequence",
        "signal",
        "start",
        "submission",
        "taken",
        "timed",
        "word",
    )

    def __init__(self, index: int, control: int) -> None:
        self.start = HEADER_BYTES + index * SLOT_BYTES
        self.word = (self.start + ANSWER_OFFSET) // WORD_BYTES  # of the answer line
        self.signal = Signal(control + self.start + ANSWER_OFFSET)
        self.timed = 0  # the latest request whose times are written
        self.says_ok = False  # the answer line has status 200 already
        self.sequence = 0  # of the latest request
        self.taken = False  # and not answered
        self.expired = False  # its timeout has passed during its step, and was counted
        self.on_stream = False  # a stream of the caller's GPU waits: an error must not end that
        self.submission: Submission | None = None
        self.deadline = math.inf
        self.data = b""
        self.line: Line | None = None
        self.recurs = False  # its request may be used again for the same line


def served(models: Sequence[str]) -> str:
    """Their names, for log lines."""
    return f"model{'s' if len(models) > 1 else ''} {', '.join(models)}"


class OpenChannel:
    """A channel apart from its requests, which the subclass takes and answers.

    caller  whose requests it has; None: an HTTP process of this server, which tells it for each request,
            and counts them
    """

    def __init__(
        self,
        number: int,
        models: Sequence[str],
        memory: Memory,
        reader: RequestReader,
        executor: Executor,
        owner: ChannelOwner,
        caller: int | None = 0,
    ) -> None:
        self.id, self.models, self.memory = str(number), models, memory
        self.taken = 0  # requests so far
        self.key = ""  # the name of that with which it was opened
        self.lane = 0  # of the last one
        self._cancels = 0  # so far
        self._reader, self._executor, self._owner = reader, executor, owner
        self._caller = caller
        self.counted = caller is not None  # in metrics
        self._view = memory.control.view
        self._words = self._view.cast("Q")  # reads and writes 8 bytes at once
        header = memory.geometry.header()
        self._view[: len(header)] = header
        address = memory.control.span.address
        self._slots = [SlotState(index, address) for index in range(memory.geometry.num_slots)]
        self._former: dict[bytes, LayerRequest] = {}  # of lines that may come again, in no slot now
        self._look_again = False  # a slot was used again before the end of its step was noticed
        self._requests = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A pipe, because the caller could make an eventfd's writer block: both sides share its flags.
        try:
            self._answers_read, self._answers = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            os.close(self._requests)
            raise
        self._lock = threading.Lock()  # of the slots' states and `_closed`
        self._ended = False  # takes no more requests
        self._closed = False  # writes no more answers
        self._in_flight = 0
        self._alarm = math.inf  # when `expire` will be called

    @property
    def geometry(self) -> Geometry:
        """The sizes of its memory."""
        return self.memory.geometry

    @property
    def served(self) -> str:
        """The names of the models, for log lines."""
        return served(self.models)

    def fileno(self) -> int:
        return self._requests

    def take_descriptors(self) -> list[int]:
        """The descriptors for the caller, which belong to the receiver of this list. Raises OSError."""
        memory, requests = self.memory, os.dup(self._requests)  # first: what is taken would be lost
        shared = [memory.control.take_descriptor()]
        if isinstance(memory.region, SealedMemory):
            shared.append(memory.region.take_descriptor())
        answers, self._answers_read = self._answers_read, -1
        return [*shared, requests, answers]

    def is_awaited(self) -> bool:
        """See `Source`: the caller's GPU will write a request, or has written one."""
        with self._lock:
            return not self._ended and self._words[_ANNOUNCED] > self.taken

    def has_arrived(self) -> bool:
        """See `Source`."""
        with self._lock:
            if self._ended:
                return False
            slot = self._slots[self.taken % len(self._slots)]
            return self._words[slot.start // WORD_BYTES] == self.taken + 1

    @abstractmethod
    def poll(self) -> None:
        """Submit every request that has arrived, and cancel those that the caller wants no more."""

    def expire(self) -> None:
        """Cancel the queued requests whose time is over, and say of those in steps that it is."""
        now = time.perf_counter()
        with self._lock:
            late = [slot for slot in self._slots if slot.deadline <= now]
            submissions = [
                (slot, slot.submission, slot.deadline) for slot in late if slot.submission is not None
            ]
            for slot in late:
                slot.deadline = math.inf
            self._alarm = min((slot.deadline for slot in self._slots), default=math.inf)
            if self._alarm < math.inf:  # under the lock: the owner must hear of alarms in their order
                self._owner.expire_at(self, self._alarm)
        for slot, submission, deadline in submissions:
            given = round((deadline - submission.arrived) * 1e6)
            where = "the queue" if submission.began is None else "its step"
            error = QueueTimeoutError(f"the request's timeout of {given} microseconds expired in {where}")
            self._executor.cancel(submission, error)
            self._expire(slot, submission, error)

    @abstractmethod
    def _expire(self, slot: SlotState, submission: Submission, error: EngineError) -> None:
        """Tell the caller that a request's timeout has passed, unless it has an answer; its step goes on."""

    def close(self) -> None:
        """Take no more requests, and answer the queued ones with 499; later calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._ended = True
            queued = [slot.submission for slot in self._slots if slot.submission is not None]
        self._executor.remove_source(self)
        for submission in queued:
            self._executor.cancel(submission, ClosedError("the channel was closed"))
        with self._lock:
            self._closed = True
            for descriptor in (self._requests, self._answers, self._answers_read):
                if descriptor >= 0:
                    os.close(descriptor)
            self._words.release()
            idle = not self._in_flight
        if idle:
            self._owner.idle(self)

    def release(self) -> None:
        """End the device's access to the memory, and forget it; may take milliseconds on a GPU."""
        self._slots.clear()  # they hold parts of the region
        self._former.clear()
        self.memory.close()
