"""The server's side of one channel: takes requests on the worker thread, and writes their answers."""

import logging
import math
import os
import time
from contextlib import suppress
from functools import partial

from expertd.service.channels.open_channel import (
    Answered,
    ChannelProtocolError,
    ClosedError,
    OpenChannel,
    SlotState,
)
from expertd.service.channels.requests import ChannelRequestError
from expertd.service.engine.errors import EngineError
from expertd.service.engine.metrics.requests import StageSeconds
from expertd.service.engine.refusals import Reason
from expertd.service.engine.steps import Submission
from expertd.service.moe.request import LayerRequest, OutputMemory
from expertd.service.statuses import STATUSES, status_of
from expertd_client.channel.fence import fence
from expertd_client.channel.layout import (
    ANSWER,
    ANSWER_OFFSET,
    CALLER,
    CANCEL_OFFSET,
    CANCELS_OFFSET,
    ERROR_BYTES,
    ERROR_OFFSET,
    EXPIRED_OFFSET,
    FAILED_OFFSET,
    FLAGS_BYTE,
    ON_STREAM,
    REASON_CODES,
    REQUEST,
    TIMES_OFFSET,
    WORD_BYTES,
)

logger = logging.getLogger(__name__)

_CANCELS = CANCELS_OFFSET // WORD_BYTES


class ServerChannel(OpenChannel):
    """A source of requests. `poll` is safe from any thread, the other methods are for the event loop."""

    def poll(self) -> None:
        """Submit every request that has arrived, and cancel those that the caller wants no more."""
        cancelled: list[Submission] = []
        with self._lock:
            if self._ended:
                return
            try:
                cancels = self._words[_CANCELS]  # before requests: those that they are for have arrived
                fence()
                # One round at most: for requests that a caller adds meanwhile, it rings again.
                for _ in self._slots:
                    if not self._take():
                        break
                if cancels != self._cancels:
                    cancelled = self._cancelled()
                    if not self._look_again:  # else one may be for a request that is not taken yet
                        self._cancels = cancels
                why = ""
            except ChannelProtocolError as error:
                why = str(error)
            except Exception:
                logger.exception("channel %s of %s failed", self.id, self.served)
                why = "internal server error: see the server's log"
            self._ended = bool(why)
        if why:
            self._owner.broken(self, why)
        for submission in cancelled:
            self._executor.cancel(submission, ClosedError("the caller has cancelled the request"))

    def forget_requests(self, model: str) -> None:
        """Keep no former request to `model`, which may refer to its graphs; safe from any thread."""
        with self._lock:
            for slot in self._slots:
                if slot.line is not None and slot.line.model.name == model:
                    slot.recurs = False
            for data in [data for data in self._former if self._reader.line(data).model.name == model]:
                del self._former[data]

    def _cancelled(self) -> list[Submission]:
        """The queued requests that the caller has cancelled. The caller of this holds the lock."""
        found = []
        for slot in self._slots:
            word = self._words[(slot.start + CANCEL_OFFSET) // WORD_BYTES]
            if slot.submission is not None and word == slot.sequence:
                found.append(slot.submission)
        return found

    def _take(self) -> bool:
        """Submit or refuse the next request; False if it has not arrived. The caller holds the lock."""
        index = self.taken % len(self._slots)
        slot, expected = self._slots[index], self.taken + 1
        sequence = self._words[slot.start // WORD_BYTES]
        if sequence != expected:
            if sequence == slot.sequence:
                return False
            raise ChannelProtocolError(f"sequence of slot {index}: expected {expected}, got {sequence}")
        if slot.taken:
            if self._words[slot.word] == slot.sequence:  # the device has answered
                self._look_again = True
                return False
            raise ChannelProtocolError(
                f"slot {index}: expected request {expected} after answer {slot.sequence}"
            )
        fence()
        start = slot.start + WORD_BYTES
        data = bytes(self._view[start : start + REQUEST.size])
        self.taken = slot.sequence = expected
        slot.on_stream = bool(data[FLAGS_BYTE] & ON_STREAM)
        slot.taken = True
        self._in_flight += 1
        try:
            self._submit(slot, data)
        except ChannelRequestError as error:
            self._answer(slot, 400, error.reason, str(error))
        except EngineError as error:
            self._fail(slot, error)
        return True

    def _submit(self, slot: SlotState, data: bytes) -> None:
        slot.line = None  # in case of an error
        line = slot.line = self._reader.line(data)
        slot.data = data
        if not line.num_tokens:
            self._answer(slot, 200, None, "")
            return
        request = self._former.pop(data, None)  # no other slot may have it at the same time
        if request is None:
            request = self._reader.request(line, slot.signal)
        request.signal = slot.signal
        slot.recurs = line.topk_ids is None or request.topk_ids is line.topk_ids  # else a copy
        slot.signal.value = slot.sequence
        if not slot.says_ok:  # before the device announces the output
            ANSWER.pack_into(self._view, slot.start + ANSWER_OFFSET + WORD_BYTES, 200, 0, 0, 0, 0, 0)
            slot.says_ok = True
        done = partial(self._done, slot)
        caller = self._caller
        if caller is None:
            caller = CALLER.unpack_from(self._view, slot.start + CANCEL_OFFSET)[0]
        timeout = line.timeout_us / 1e6 if line.timeout_us else None
        submission = Submission(
            line.model.name,
            request,
            done,
            on_worker=True,
            priority=line.priority,
            caller=caller,
            timeout=timeout,
        )
        self._executor.submit(submission)
        slot.submission = submission
        self.lane = submission.lane
        if timeout is not None:
            slot.deadline = submission.deadline
            if slot.deadline < self._alarm:
                self._alarm = slot.deadline
                self._owner.expire_at(self, slot.deadline)

    def _expire(self, slot: SlotState, submission: Submission, error: EngineError) -> None:
        """See `OpenChannel._expire`. HTTP processes know it by themselves."""
        if not self.counted:
            return
        with self._lock:
            has_ended = slot.submission is not submission or self._closed
            if has_ended or self._words[slot.word] == slot.sequence:
                return
            # Not in the answer: the device may be writing that now, and the step still uses the region.
            self._words[slot.word + EXPIRED_OFFSET // WORD_BYTES] = slot.sequence
            self._ring()
            slot.expired = True
            now = time.perf_counter()
            began, seconds = submission.began or now, now - submission.arrived
            stages = 0.0, began - submission.arrived, now - began
            what = status_of(error), error.reason, str(error)
            tokens = submission.request.num_tokens
            answer = Answered(submission.model, slot.sequence, *what, seconds, stages, tokens)
        self._owner.answered(self, answer)

    def _done(self, slot: SlotState, output: OutputMemory | Exception) -> None:
        with self._lock:
            if slot.recurs and slot.submission is not None:
                self._keep(slot.data, slot.submission.request)
            if isinstance(output, Exception):
                self._fail(slot, output)
            elif not self._closed and self._words[slot.word] == slot.sequence:  # the device has answered
                submission, slot.submission = slot.submission, None
                assert submission is not None
                slot.deadline = math.inf
                slot.taken = False
                counted = self._counts(slot)
                later = partial(self._note, slot, slot.sequence, submission, counted, not slot.on_stream)
                self._executor.defer(later)
            else:
                self._answer(slot, 200, None, "")
        if self._look_again:
            self._look_again = False
            self.poll()

    def _keep(self, data: bytes, request: LayerRequest) -> None:
        """Use a request again when its line comes again. The caller of this holds the lock."""
        if len(self._former) >= len(self._slots):
            del self._former[next(iter(self._former))]
        self._former[data] = request

    def _fail(self, slot: SlotState, error: Exception) -> None:
        if isinstance(error, EngineError):
            self._answer(slot, status_of(error), error.reason, str(error), error.retry_after * 1000)
        else:
            self._answer(slot, STATUSES["client_gone"], "client_gone", str(error))

    def _counts(self, slot: SlotState) -> bool:
        """Whether an answer is to be counted: that of an expired request was, when its timeout passed."""
        expired, slot.expired = slot.expired, False
        return self.counted and not expired

    def _note(
        self, slot: SlotState, sequence: int, submission: Submission, counted: bool, rings: bool
    ) -> None:
        """Complete the answer to a request that the device has answered; its slot may be in use again."""
        with self._lock:
            seconds, stages = self._announce(slot, sequence, submission, rings)
        if counted:
            tokens = submission.request.num_tokens
            answer = Answered(submission.model, sequence, 200, None, "", seconds, stages, tokens)
            self._owner.answered(self, answer)

    def _answer(
        self, slot: SlotState, status: int, reason: Reason | None, text: str, retry_after_ms: int = 0
    ) -> None:
        """Write the answer and wake the caller. The caller of this holds the lock."""
        submission, slot.submission = slot.submission, None
        slot.deadline = math.inf
        slot.taken = False
        if not self._closed:
            if status != 200 or not slot.says_ok:
                error = text.encode()[:ERROR_BYTES]
                self._view[slot.start + ERROR_OFFSET : slot.start + ERROR_OFFSET + len(error)] = error
                code = 0 if reason is None else REASON_CODES.get(reason, 0)
                values = (status, len(error), retry_after_ms, code, 0, 0)
                ANSWER.pack_into(self._view, slot.start + ANSWER_OFFSET + WORD_BYTES, *values)
                slot.says_ok = status == 200
            fence()
            failed = status != 200 and slot.on_stream
            self._words[slot.word + (FAILED_OFFSET // WORD_BYTES if failed else 0)] = slot.sequence
        rings = status != 200 or not slot.on_stream
        seconds, stages = self._announce(slot, slot.sequence, submission, rings)
        if self._counts(slot):
            line = slot.line
            model = self.models[0] if len(self.models) == 1 else line.model.name if line else ""
            tokens = line.num_tokens if line else None
            answer = Answered(model, slot.sequence, status, reason, text, seconds, stages, tokens)
            self._owner.answered(self, answer)

    def _announce(
        self, slot: SlotState, sequence: int, submission: Submission | None, rings: bool
    ) -> tuple[float, StageSeconds]:
        """Write the times of an answer, and ring; seconds since the request was read, and their stages."""
        queue = seconds = compute = 0.0
        if submission is not None:
            now = time.perf_counter()
            seconds = now - submission.arrived
            queue = (submission.began or now) - submission.arrived
            compute = submission.compute_seconds
        self._in_flight -= 1
        if not self._closed:
            if sequence > slot.timed:  # else a later request of the slot has its answer already
                words, times = self._words, slot.word + TIMES_OFFSET // WORD_BYTES
                words[times], words[times + 1] = int(queue * 1e9), int(compute * 1e9)
                fence()
                words[times + 2] = slot.timed = sequence
            if rings:
                self._ring()
        elif not self._in_flight:
            self._owner.idle(self)
        return seconds, (0.0, queue, compute)

    def _ring(self) -> None:
        with suppress(OSError):  # full: it is readable anyway; broken: the caller is gone
            os.write(self._answers, b"\1")
