"""Requests that a GPU makes by itself when its stream gets there, and whose answers it awaits by itself.

The caller's thread writes request lines ahead, and never waits for an answer. Answers ring no bell. A thread
of its own sleeps until the server says that it has none, or has gone. Then it makes the requests that have no
answer once more, in their order, each when the stream has come to it, over a channel that it opens anew, and
writes the words for which the stream waits.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from expertd_client.channel.layout import ANSWER_OFFSET, FLAGS_BYTE, ON_STREAM, WORD_BYTES
from expertd_client.channel.link import ChannelClient
from expertd_client.channel.opening import Opened
from expertd_client.channel.slots import Slot
from expertd_client.channel.stream import CallerStream
from expertd_client.channel.waiting import AnswerWait, Waiters
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError
from expertd_client.retries import with_retries
from expertd_client.steps import Steps, run

logger = logging.getLogger("expertd_client")

_PAUSE_SECONDS = 50e-6  # between two looks at what a GPU will write
_LOOK_SECONDS = 1.0  # how often a request is looked for that takes too long
_CLOSE_SECONDS = 5.0  # in which a channel that is closed still gets its answers


@dataclass(slots=True, eq=False, repr=False)
class Enqueued:
    """A request that a stream makes. `line` is without its sequence."""

    slot: Slot
    num_tokens: int
    line: bytes
    link: ChannelClient
    sequence: int
    place: int  # the address of the word with the sequence, for the stream
    words: "memoryview[int]"
    word: int  # the number of the answer's

    def is_answered(self) -> bool:
        """Whether the stream may go on. Ask before the server's slot is used again."""
        return self.words[self.word] == self.sequence

    def times(self) -> tuple[float, float] | None:
        """Seconds in the server's queue, and of the step; None: not known yet, or no more. Never waits."""
        return self.link.times(self.sequence, waits=False)

    def __repr__(self) -> str:
        return f"Enqueued(slot={self.slot.index}, num_tokens={self.num_tokens})"


class Enqueuer:
    """The requests of one channel, from the thread that enqueues, and the thread that mends.

    seconds     that the server may take for a request, once the stream has come to it
    on_failure  is called, by another thread, with the error for which outputs are NaN from now on
    """

    def __init__(
        self,
        opened: Opened,
        stream: CallerStream,
        reopen: Callable[[Opened, Deadline], Steps[Opened]],
        deadline: Deadline,
        on_failure: Callable[[ExpertError], object],
    ) -> None:
        self._opened, self._stream, self._reopen = opened, stream, reopen
        self._link = opened.link  # that requests are written to, also if it is lost
        self._addresses: dict[ChannelClient, int] = {}
        self._seconds, self._retry_seconds = deadline.seconds, deadline.retry_seconds
        self._on_failure = on_failure
        self._error: ExpertError | None = None
        # The lock is never held while a stream is used: that may wait for the thread that mends.
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._outstanding: deque[Enqueued] = deque()
        self._is_lost = self._is_closed = False
        self._oldest: Enqueued | None = None
        self._since = 0.0  # when that was the oldest first
        self._pid = os.getpid()
        _all.add(self)
        self._thread = threading.Thread(target=self._watch, name="expertd-channel", daemon=True)
        self._thread.start()

    def enqueue(self, slot: Slot, num_tokens: int, line: bytes) -> Enqueued:
        """Make a request when the stream gets there; while all of the server's slots are taken, it waits.

        Raises ExpertError if earlier ones have failed.
        """
        self._stream.check()
        while (request := self._begin(slot, num_tokens, line)) is None:
            time.sleep(_PAUSE_SECONDS)
        self._stream.write(request.place, request.sequence)
        with self._lock:
            if self._is_lost:
                self._news.notify()
            elif request.link.is_open:
                request.link.announce(request.sequence)
        return request

    def wait(self, request: Enqueued) -> None:
        """Have the stream wait for the answer."""
        self._stream.wait(request.place + ANSWER_OFFSET, request.sequence)

    def close(self) -> bool:
        """Wait for what is outstanding, for a short time, then let the stream go on; False if it had to.

        Outputs that are not there are NaN then.
        """
        if self._is_closed or self._pid != os.getpid():
            return True
        is_other = threading.current_thread() is not self._thread
        end = time.monotonic() + _CLOSE_SECONDS
        while is_other and not self._is_idle() and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
        with self._lock:
            self._is_closed = True
            self._news.notify()
            rest = [request for request in self._outstanding if not request.is_answered()]
            self._link.hang_up()
        for request in rest:
            self._give_up(request)
        if is_other:
            self._thread.join(_LOOK_SECONDS)
        self._link.close()
        return not rest

    def _begin(self, slot: Slot, num_tokens: int, line: bytes) -> Enqueued | None:
        """Write a request line; None if there is no slot for it yet."""
        link = self._link
        address = self._addresses.get(link)
        if address is None:
            address = self._addresses[link] = self._stream.register(link.control)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._is_closed or link.is_closed:
                raise link.closed_error()
            self._first()
            if link is not self._link or not (sequence := link.prepare(line)):
                return None
            start = link.start_of(sequence)
            word = (start + ANSWER_OFFSET) // WORD_BYTES
            request = Enqueued(slot, num_tokens, line, link, sequence, address + start, link.words, word)
            self._outstanding.append(request)
            return request

    def _first(self) -> Enqueued | None:
        """The oldest request without an answer; those before it are forgotten. The caller has the lock."""
        outstanding = self._outstanding
        while outstanding and outstanding[0].is_answered():
            outstanding.popleft()
        return outstanding[0] if outstanding else None

    def _is_idle(self) -> bool:
        with self._lock:
            return self._first() is None

    def _watch(self) -> None:
        while not self._is_closed and self._error is None:
            link = self._link
            link.sleep(_LOOK_SECONDS)
            if not self._is_closed and (error := self._trouble(link)) is not None:
                self._mend(error)

    def _trouble(self, link: ChannelClient) -> ExpertError | None:
        """Why requests have no answers, or None."""
        link.clear()
        with self._lock:
            failed = next((each for each in self._outstanding if link.has_failed(each.sequence)), None)
        if failed is not None:
            try:
                link.take_answer(failed.sequence)
            except ExpertError as error:
                return error
        if not link.is_open:
            return link.closed_error()
        with self._lock:
            request = self._first()
        now = time.monotonic()
        if request is None or request is not self._oldest or not link.has_arrived(request.sequence):
            self._oldest, self._since = request, now
        elif now - self._since > self._seconds:
            return Deadline(self._seconds).error()
        return None

    def _mend(self, error: ExpertError) -> None:
        """Make all requests without an answer once more, or give them up, until there are none."""
        with self._lock:
            self._is_lost = True
            self._link.close(is_lost=True)
        opened: Opened | None = None
        why: ExpertError | None = error

        def repeat(request: Enqueued, deadline: Deadline) -> Steps[None]:
            nonlocal opened
            if opened is None or not opened.link.is_alive():
                if not deadline.may_repeat():
                    raise error
                opened = yield from self._reopen(self._opened, deadline)
            link = opened.link
            sequence = link.send(by_host(request.line))
            yield AnswerWait(Waiters(link), sequence, deadline)
            link.take_answer(sequence)

        while (request := self._next(opened)) is not None:
            if self._error is None:
                deadline = Deadline(self._seconds, self._retry_seconds)
                try:
                    run(with_retries(lambda: repeat(request, deadline), 0, deadline, why))  # noqa: B023
                except Exception as failed:
                    self._fail(failed if isinstance(failed, ExpertError) else ExpertError(repr(failed)))
                why = None
            if self._error is None:
                request.link.answer(request.sequence)
            else:
                self._give_up(request)
        if opened is not None and self._link is not opened.link:
            opened.link.close()

    def _next(self, opened: Opened | None) -> Enqueued | None:
        """The next request to mend, once the stream has come to it; None: there is none any more."""
        while not self._is_closed:
            with self._lock:
                request = self._first()
                if request is None and self._error is not None:
                    return None
                if request is None and opened is not None:
                    self._opened, self._link, self._is_lost = opened, opened.link, False
                    return None
                if request is None:
                    self._news.wait()  # nothing is lost: the next request opens the channel
                    continue
            if request.link.has_arrived(request.sequence):
                return request
            time.sleep(_PAUSE_SECONDS)
        return None

    def _fail(self, error: ExpertError) -> None:
        with self._lock:
            self._error = error
        logger.error("channel: outputs of enqueued requests are NaN from now on: %s", error)
        try:
            self._on_failure(error)
        except Exception:
            logger.exception("channel: on_failure failed")

    def _give_up(self, request: Enqueued) -> None:
        """Let the stream go on without the output."""
        try:
            self._stream.fill(request.slot.rows(request.num_tokens))
        except Exception:  # the stream would wait for ever
            logger.exception("channel: an output of an enqueued request is not NaN")
        request.link.answer(request.sequence)


def by_host(line: bytes) -> bytes:
    """A request line for an answer that rings."""
    flags = line[FLAGS_BYTE] & ~ON_STREAM
    return line[:FLAGS_BYTE] + bytes([flags]) + line[FLAGS_BYTE + 1 :]


_all: "weakref.WeakSet[Enqueuer]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No stream may wait for ever when the process ends."""
    for each in list(_all):
        with suppress(Exception):
            each.close()
