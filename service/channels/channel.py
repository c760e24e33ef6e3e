"""The server's side of one channel: takes requests on the worker thread, and writes their answers."""

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from expertd.service.channels.layout import (
    ANSWER,
    ANSWER_OFFSET,
    CANCEL_OFFSET,
    CANCELS_OFFSET,
    ERROR_BYTES,
    ERROR_OFFSET,
    HEADER_BYTES,
    REASON_CODES,
    REQUEST,
    SEQUENCE_BYTES,
    SLOT_BYTES,
    TIMES_OFFSET,
    Geometry,
    fence,
)
from expertd.service.channels.memory import DataRegion, SealedMemory
from expertd.service.channels.requests import InvalidRequestError, Line, RequestReader
from expertd.service.engine.batching import Scheduler
from expertd.service.engine.errors import EngineError, QueueFullError, QueueTimeoutError
from expertd.service.engine.refusals import Reason
from expertd.service.engine.statuses import ANSWERS
from expertd.service.engine.steps import Pending
from expertd.service.moe.request import LayerRequest, Output, Signal

logger = logging.getLogger(__name__)

_CANCELS = CANCELS_OFFSET // SEQUENCE_BYTES


class Answered(NamedTuple):
    """A request that has been answered; reason: None for status 200, seconds: since it was read.

    model is "" if the request names none of the channel's several models.
    """

    model: str
    sequence: int
    status: int
    reason: Reason | None
    text: str
    seconds: float


class Owner(Protocol):
    """Where a channel reports to, from any thread."""

    def answered(self, channel: "Channel", answer: Answered) -> None: ...

    def broken(self, channel: "Channel", why: str) -> None:
        """The caller broke the protocol; the channel takes no more requests, and must be closed."""

    def idle(self, channel: "Channel") -> None:
        """No step uses the closed channel any more: `release` may be called."""

    def expire_at(self, channel: "Channel", when: float) -> None:
        """`expire` must be called at `when`, by `time.perf_counter`."""


class ClosedError(Exception):
    """The channel was closed, or the request cancelled, before the request's step."""


class BrokenError(Exception):
    """The caller broke the protocol; the text says how."""


class Memory(NamedTuple):
    """What caller and server share: the control memory, and the data region that requests lie in."""

    geometry: Geometry
    control: SealedMemory
    region: DataRegion


class _Slot:
    """The state of one slot. `data` and `line` are its latest valid request line, because lines repeat."""

    __slots__ = (
        "data",
        "deadline",
        "line",
        "pending",
        "request",
        "says_ok",
        "sequence",
        "signal",
        "start",
        "taken",
        "word",
    )

    def __init__(self, index: int, control: int) -> None:
        self.start = HEADER_BYTES + index * SLOT_BYTES
        self.word = (self.start + ANSWER_OFFSET) // SEQUENCE_BYTES  # of the answer line
        self.signal = Signal(control + self.start + ANSWER_OFFSET)
        self.says_ok = False  # the answer line has status 200 already
        self.sequence = 0  # of the latest request
        self.taken = False  # and not answered
        self.pending: Pending | None = None
        self.deadline = math.inf
        self.data = b""
        self.line: Line | None = None
        self.request: LayerRequest | None = None  # of `line`, unless it has routing


class Channel:
    """A source of requests. `poll` is safe from any thread, the other methods are for the event loop."""

    def __init__(
        self,
        number: int,
        models: Sequence[str],
        memory: Memory,
        reader: RequestReader,
        scheduler: Scheduler,
        owner: Owner,
        counted: bool = True,
    ) -> None:
        self.id, self.models, self.memory = str(number), models, memory
        self.taken = 0  # requests so far
        self._cancels = 0  # so far
        self._reader, self._scheduler, self._owner = reader, scheduler, owner
        self.counted = counted  # in metrics
        self._view = memory.control.view
        self._words = self._view.cast("Q")  # reads and writes 8 bytes at once
        header = memory.geometry.header()
        self._view[: len(header)] = header
        address = memory.control.span.address
        self._slots = [_Slot(index, address) for index in range(memory.geometry.num_slots)]
        self._look_again = False  # a slot was used again before the end of its step was noticed
        self._requests = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A pipe, because the caller could make an eventfd's writer block: both sides share its flags.
        self._answers_read, self._answers = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()  # of the slots' states and `_closed`
        self._ended = False  # takes no more requests
        self._closed = False  # writes no more answers
        self._in_flight = 0
        self._alarm = math.inf  # when `expire` will be called

    @property
    def served(self) -> str:
        """The names of the models, for log lines."""
        return f"model{'s' if len(self.models) > 1 else ''} {', '.join(self.models)}"

    def fileno(self) -> int:
        return self._requests

    def take_descriptors(self) -> list[int]:
        """The descriptors for the caller, which belong to the receiver of this list."""
        memory = self.memory
        shared = [memory.control.take_descriptor()]
        if isinstance(memory.region, SealedMemory):
            shared.append(memory.region.take_descriptor())
        answers, self._answers_read = self._answers_read, -1
        return [*shared, os.dup(self._requests), answers]

    def poll(self) -> None:
        """Submit every request that has arrived, and cancel those that the caller wants no more."""
        cancelled: list[Pending] = []
        with self._lock:
            try:
                # One round at most: for requests that a caller adds meanwhile, it rings again.
                for _ in self._slots:
                    if self._ended or not self._take():
                        break
                if not self._ended and self._words[_CANCELS] != self._cancels:
                    cancelled = self._cancelled()
                why = ""
            except BrokenError as error:
                why = str(error)
            except Exception:
                logger.exception("channel %s of %s failed", self.id, self.served)
                why = "internal server error: see the server's log"
            self._ended = self._ended or bool(why)
        if why:
            self._owner.broken(self, why)
        for pending in cancelled:
            self._scheduler.cancel(pending, ClosedError("the caller has cancelled the request"))

    def expire(self) -> None:
        """Cancel the queued requests whose time is over."""
        now = time.perf_counter()
        with self._lock:
            late = [slot for slot in self._slots if slot.deadline <= now]
            pendings = [(slot.pending, slot.deadline) for slot in late if slot.pending is not None]
            for slot in late:
                slot.deadline = math.inf
            self._alarm = min((slot.deadline for slot in self._slots), default=math.inf)
            alarm = self._alarm
        for pending, deadline in pendings:
            seconds = round(deadline - pending.arrived, 6)
            text = f"the request's timeout of {seconds} s expired in the queue"
            self._scheduler.cancel(pending, QueueTimeoutError(text))
        if alarm < math.inf:
            self._owner.expire_at(self, alarm)

    def close(self) -> None:
        """Take no more requests, and answer the queued ones with 499; later calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._ended = True
            queued = [slot.pending for slot in self._slots if slot.pending is not None]
        self._scheduler.remove_source(self)
        for pending in queued:
            self._scheduler.cancel(pending, ClosedError("the channel was closed"))
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
        self.memory.region.close()
        self.memory.control.close()

    def _cancelled(self) -> list[Pending]:
        """The queued requests that the caller has cancelled. The caller of this holds the lock."""
        self._cancels = self._words[_CANCELS]
        fence()
        found = []
        for slot in self._slots:
            word = self._words[(slot.start + CANCEL_OFFSET) // SEQUENCE_BYTES]
            if slot.pending is not None and word == slot.sequence:
                found.append(slot.pending)
        return found

    def _take(self) -> bool:
        """Submit or refuse the next request; False if it has not arrived. The caller holds the lock."""
        index = self.taken % len(self._slots)
        slot, expected = self._slots[index], self.taken + 1
        sequence = self._words[slot.start // SEQUENCE_BYTES]
        if sequence != expected:
            if sequence == slot.sequence:
                return False
            raise BrokenError(f"sequence of slot {index}: expected {expected}, got {sequence}")
        if slot.taken:
            if self._words[slot.word] == slot.sequence:  # the device has answered
                self._look_again = True
                return False
            raise BrokenError(f"slot {index}: expected request {expected} after answer {slot.sequence}")
        fence()
        start = slot.start + SEQUENCE_BYTES
        data = bytes(self._view[start : start + REQUEST.size])
        self.taken = slot.sequence = expected
        slot.taken = True
        self._in_flight += 1
        try:
            self._submit(slot, data)
        except InvalidRequestError as error:
            self._answer(slot, 400, error.reason, str(error))
        except EngineError as error:
            self._fail(slot, error)
        return True

    def _submit(self, slot: _Slot, data: bytes) -> None:
        if data != slot.data or slot.line is None:
            slot.line = None  # in case of an error
            slot.line, slot.data, slot.request = self._reader.line(data), data, None
        line = slot.line
        if not line.num_tokens:
            self._answer(slot, 200, None, "")
            return
        request = slot.request
        if request is None:
            request = self._reader.request(line, slot.signal)
            if line.topk_ids is None:
                slot.request = request
        slot.signal.value = slot.sequence
        if not slot.says_ok:  # before the device announces the output
            ANSWER.pack_into(self._view, slot.start + ANSWER_OFFSET + SEQUENCE_BYTES, 200, 0, 0, 0, 0, 0)
            slot.says_ok = True
        done = partial(self._done, slot)
        slot.pending = pending = self._scheduler.submit(line.model.name, request, done, on_worker=True)
        if line.timeout_us:
            slot.deadline = pending.arrived + line.timeout_us / 1e6
            if slot.deadline < self._alarm:
                self._alarm = slot.deadline
                self._owner.expire_at(self, slot.deadline)

    def _done(self, slot: _Slot, output: Output | Exception) -> None:
        with self._lock:
            if isinstance(output, Exception):
                self._fail(slot, output)
            elif not self._closed and self._words[slot.word] == slot.sequence:  # the device has answered
                pending, slot.pending = slot.pending, None
                assert pending is not None
                slot.deadline = math.inf
                slot.taken = False
                self._scheduler.do_later(partial(self._note, slot, slot.sequence, pending))
            else:
                self._answer(slot, 200, None, "")
        if self._look_again:
            self._look_again = False
            self.poll()

    def _fail(self, slot: _Slot, error: Exception) -> None:
        if isinstance(error, EngineError):
            status, reason = ANSWERS[type(error)]
            retry_after = error.retry_after * 1000 if isinstance(error, QueueFullError) else 0
            self._answer(slot, status, reason, str(error), retry_after)
        else:
            self._answer(slot, 499, "client_gone", str(error))

    def _note(self, slot: _Slot, sequence: int, pending: Pending) -> None:
        """Complete the answer to a request that the device has answered; its slot may be in use again."""
        with self._lock:
            seconds = self._announce(slot, sequence, pending)
        if self.counted:
            self._owner.answered(self, Answered(pending.model, sequence, 200, None, "", seconds))

    def _answer(
        self, slot: _Slot, status: int, reason: Reason | None, text: str, retry_after_ms: int = 0
    ) -> None:
        """Write the answer and wake the caller. The caller of this holds the lock."""
        pending, slot.pending = slot.pending, None
        slot.deadline = math.inf
        slot.taken = False
        if not self._closed:
            if status != 200 or not slot.says_ok:
                error = text.encode()[:ERROR_BYTES]
                self._view[slot.start + ERROR_OFFSET : slot.start + ERROR_OFFSET + len(error)] = error
                code = 0 if reason is None else REASON_CODES.get(reason, 0)
                values = (status, len(error), retry_after_ms, code, 0, 0)
                ANSWER.pack_into(self._view, slot.start + ANSWER_OFFSET + SEQUENCE_BYTES, *values)
                slot.says_ok = status == 200
            fence()
            self._words[slot.word] = slot.sequence
        seconds = self._announce(slot, slot.sequence, pending)
        if self.counted:
            model = self.models[0] if len(self.models) == 1 else slot.line.model.name if slot.line else ""
            self._owner.answered(self, Answered(model, slot.sequence, status, reason, text, seconds))

    def _announce(self, slot: _Slot, sequence: int, pending: Pending | None) -> float:
        """Write the times of an answer, and ring; seconds since the request was read."""
        queue = seconds = compute = 0.0
        if pending is not None:
            now = time.perf_counter()
            seconds = now - pending.arrived
            queue = (pending.began or now) - pending.arrived
            compute = pending.compute_seconds
        self._in_flight -= 1
        if not self._closed:
            words, times = self._words, slot.word + TIMES_OFFSET // SEQUENCE_BYTES
            words[times], words[times + 1] = int(queue * 1e9), int(compute * 1e9)
            fence()
            words[times + 2] = sequence
            with suppress(OSError):  # full: it is readable anyway; broken: the caller is gone
                os.write(self._answers, b"\1")
        elif not self._in_flight:
            self._owner.idle(self)
        return seconds
