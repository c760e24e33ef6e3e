"""Device calls as requests of a channel with one slot, for servers whose host launches steps.

The GPU writes request lines by itself, in memory of the host, and waits there for answers. A thread sleeps
until the server says that it has none, or has gone. From then on it passes each request on over a channel
that it opens anew, with the same memory for tensors, and writes the words for which the GPU waits.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from expertd_client.channel.enqueueing import by_host
from expertd_client.channel.layout import (
    ANSWER_OFFSET,
    CODES,
    ON_STREAM,
    REFUSED,
    REQUEST,
    ROUTED,
    WORD_BYTES,
)
from expertd_client.channel.link import ChannelClient
from expertd_client.channel.opening import Opened
from expertd_client.channel.waiting import AnswerWait, Waiters
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError
from expertd_client.places import CallLayout
from expertd_client.retries import with_retries
from expertd_client.steps import Steps, run

logger = logging.getLogger("expertd_client")

_FIRST = 1
_ALL = (1 << 64) - 1  # every request is announced
_LOOK_SECONDS = 1.0
# Between two looks at what the GPU writes, and once nothing has come for `_PATIENT_SECONDS`.
_PAUSE_SECONDS, _RARE_SECONDS, _PATIENT_SECONDS = 50e-6, 1e-3, 1.0


class CallAddresses(NamedTuple):
    """Where a GPU reads and writes the calls of a slot; `CallPlace` of device_call.cu."""

    header: int
    hidden_states: int
    topk_ids: int
    topk_weights: int
    answer: int
    out: int


class CallRequests:
    """The calls of one slot.

    opened    a channel with one slot and BF16 tensors in the places of `where`
    reopen    opens it again after its server has gone, with the same memory
    deadline  each call that has to be passed on has as much time
    """

    def __init__(
        self,
        opened: Opened,
        where: CallLayout,
        reopen: Callable[[Opened, Deadline], Steps[Opened]],
        deadline: Deadline,
    ) -> None:
        self._opened, self._where, self._reopen = opened, where, reopen
        self._seconds, self._retry_seconds = deadline.seconds, deadline.retry_seconds
        self._link = link = opened.link
        self._start = link.start_of(_FIRST)
        places = where.hidden_states, where.topk_ids, where.topk_weights, where.output
        bf16 = CODES["BF16"]
        # The GPU writes the first and the last field of each request.
        link.prepare(REQUEST.pack(0, bf16, bf16, ROUTED | ON_STREAM, 0, *places, 0, 0))
        link.announce(_ALL)
        self.is_closed = False
        self._thread: threading.Thread | None = None

    def addresses(self, control: int, data: int) -> CallAddresses:
        """For a GPU that has the channel's memories at these addresses."""
        where, line = self._where, control + self._start
        rows = data + where.hidden_states, data + where.topk_ids, data + where.topk_weights
        return CallAddresses(line, *rows, line + ANSWER_OFFSET, data + where.output)

    @property
    def is_answered(self) -> bool:
        """Whether no call waits for an answer."""
        return not self._unanswered()

    def start(self, has_failed: Callable[[], bool]) -> None:
        """Watch the channel, until a call `has_failed` for good or it is closed."""
        self._thread = threading.Thread(
            target=self._watch, args=(has_failed,), name="expertd-device-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Give the channel up, and its memory, unless a call has no answer: its step may still use it."""
        self.is_closed = True
        self._link.hang_up()
        if self._thread is not None:
            self._thread.join()
        is_answered = self.is_answered
        self._link.close()
        memory = self._opened.exported
        if is_answered and memory is not None:
            # Now: a collection of garbage would wait for the GPU whenever it happens.
            memory.close()

    def _watch(self, has_failed: Callable[[], bool]) -> None:
        """Without CUDA: a call may be waiting, and so the driver."""
        link = self._link
        while not (self.is_closed or has_failed()):
            link.sleep(_LOOK_SECONDS)
            if self.is_closed:
                return
            link.clear()
            error: ExpertError | None = None if link.is_open else link.closed_error()
            if (sequence := self._unanswered()) and link.has_failed(sequence):
                try:
                    link.take_answer(sequence)
                except ExpertError as failed:
                    error = failed
            if error is not None:
                logger.warning("channel: this process passes calls of its GPU on from now on: %s", error)
                self._pass_on(error, has_failed)
                return

    def _unanswered(self) -> int:
        """The sequence of a call that has no answer; 0: there is none."""
        words, word = self._link.words, self._start // WORD_BYTES
        sequence = words[word]
        return 0 if words[word + ANSWER_OFFSET // WORD_BYTES] == sequence else int(sequence)

    def _pass_on(self, error: ExpertError, has_failed: Callable[[], bool]) -> None:
        """Make requests without an answer once more, each over a channel of this thread, until the end."""
        old, opened = self._link, None
        old.close(is_lost=True)
        why: ExpertError | None = error
        news = time.monotonic()

        def repeat(deadline: Deadline) -> Steps[None]:
            nonlocal opened
            if opened is None or not opened.link.is_alive():
                if not deadline.may_repeat():
                    raise error
                opened = yield from self._reopen(self._opened, deadline)
            line = bytes(old.control[self._start + WORD_BYTES :][: REQUEST.size])
            yield from _answered(opened.link, by_host(line), deadline)

        while not (self.is_closed or has_failed()):
            if not (sequence := self._unanswered()):
                is_expected = time.monotonic() - news < _PATIENT_SECONDS
                time.sleep(_PAUSE_SECONDS if is_expected else _RARE_SECONDS)
                continue
            deadline = Deadline(self._seconds, self._retry_seconds)
            try:
                run(with_retries(lambda: repeat(deadline), 0, deadline, why))  # noqa: B023
            except ExpertError as failed:
                logger.error("channel: calls get no answers any more: %s", failed)
                old.answer(sequence | REFUSED)
                break
            why, news = None, time.monotonic()
            old.answer(sequence)
        if opened is not None:
            opened.link.close()


def _answered(link: ChannelClient, line: bytes, deadline: Deadline) -> Steps[None]:
    """Send a request, and wait for its answer. Raises ExpertError."""
    sequence = link.send(line)
    yield AnswerWait(Waiters(link), sequence, deadline)
    link.take_answer(sequence)
