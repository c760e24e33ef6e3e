"""A claimed channel: requests and answers in its control memory, and the wait for answers."""

import os
import select
import socket
import threading
import time
import weakref
from contextlib import suppress
from typing import NamedTuple

from expertd_client.channel.claiming import Claimed
from expertd_client.channel.fence import fence
from expertd_client.channel.layout import (
    ANNOUNCED_OFFSET,
    ANSWER,
    ANSWER_OFFSET,
    CANCEL_OFFSET,
    CANCELS_OFFSET,
    ERROR_OFFSET,
    FAILED_OFFSET,
    HEADER_BYTES,
    SLOT_BYTES,
    TIMES_OFFSET,
    WORD_BYTES,
)
from expertd_client.errors import ServerUnreachableError, error_of

SPIN_SECONDS = 250e-6
_RING = (1).to_bytes(8, "little")  # what is added to the eventfd after each request
_FIRST_ANSWER, _SLOT_WORDS = (HEADER_BYTES + ANSWER_OFFSET) // WORD_BYTES, SLOT_BYTES // WORD_BYTES
_PIPE_BYTES = 65536
_MAX_POLL_SECONDS = 1e6  # poll() takes a C int of milliseconds


class Failure(NamedTuple):
    """Why a request has no output; reason: of REASON_CODES."""

    status: int
    text: str
    retry_after_ms: int  # 0: unknown
    reason: int


class ChannelClient:
    """Requests have the sequence numbers 1, 2, 3, ... One thread at a time may `send`, another one `sleep`.

    `spin_seconds`: how long a wait looks at the memory before it sleeps. It does not while answers take more
    than twice as long.
    """

    def __init__(self, claimed: Claimed, spin_seconds: float = SPIN_SECONDS) -> None:
        self.id = claimed.id
        self.data = claimed.data
        self.is_open = True  # False: the server has closed it, or this side has
        self.is_closed = False  # by this side, for good
        self.sequence = 0  # of the latest request
        self.num_slots = claimed.num_slots
        self._is_taken = [False] * claimed.num_slots  # by a request whose answer was not taken
        self.answers = claimed.answers
        self.connection = claimed.connection
        self._bell = claimed.bell
        self._control = memoryview(claimed.control)
        self.words = self._control.cast("Q")  # of it: 8 bytes are read and written at once
        self._spin_seconds = spin_seconds
        self._is_slow = False
        self._poll = select.poll()
        self._poll.register(self.answers, select.POLLIN)
        self._poll.register(self.connection, select.POLLIN)
        self._cancels = 0  # so far
        self._asks = threading.Lock()
        self._lost = select.poll()
        self._lost.register(self.connection, select.POLLIN)
        _links.add(self)

    def has_room(self) -> bool:
        """Whether `send` would send now: slots have an order."""
        return self.is_open and not self._is_taken[self.sequence % self.num_slots]

    def send(self, line: bytes) -> int:
        """Write a request line without its sequence, and ring; its sequence, or 0 if no slot is free."""
        previous = self.sequence
        sequence = previous + 1
        slot = previous % self.num_slots
        start = HEADER_BYTES + slot * SLOT_BYTES
        if not self.is_open:
            raise self.closed_error()
        if self._is_taken[slot]:
            return 0
        self._is_taken[slot] = True
        self._control[start + WORD_BYTES : start + WORD_BYTES + len(line)] = line
        fence()
        self.words[start // WORD_BYTES] = sequence
        self.sequence = sequence
        os.write(self._bell, _RING)
        return sequence

    def cancel(self, sequence: int) -> None:
        """Ask the server to answer a request at once, with 499, if it is still queued."""
        self.words[(self.start_of(sequence) + CANCEL_OFFSET) // WORD_BYTES] = sequence
        fence()
        self._cancels += 1
        self.words[CANCELS_OFFSET // WORD_BYTES] = self._cancels
        os.write(self._bell, _RING)

    @property
    def control(self) -> memoryview:
        """The control memory, in which a GPU writes and reads words of `prepare`d requests."""
        return self._control

    def start_of(self, sequence: int) -> int:
        """Where a request's slot begins in the control memory, and the word with its sequence."""
        return HEADER_BYTES + (sequence - 1) % self.num_slots * SLOT_BYTES

    def prepare(self, line: bytes) -> int:
        """Write the line of a request whose sequence a GPU will write; that, or 0 if no slot is free."""
        sequence = self.sequence + 1
        if sequence > self.num_slots and not self.is_answered(sequence - self.num_slots):
            return 0
        start = self.start_of(sequence) + WORD_BYTES
        self._control[start : start + len(line)] = line
        fence()
        self.sequence = sequence
        return sequence

    def announce(self, sequence: int) -> None:
        """Have the server look for a request that a GPU will write."""
        self.words[ANNOUNCED_OFFSET // WORD_BYTES] = sequence
        os.write(self._bell, _RING)

    def has_arrived(self, sequence: int) -> bool:
        """Whether the GPU has written the sequence of a request."""
        return bool(self.words[self.start_of(sequence) // WORD_BYTES] == sequence)

    def has_failed(self, sequence: int) -> bool:
        """Whether a request that a GPU has written has an error, which `take_answer` raises."""
        return bool(
            self.words[(self.start_of(sequence) + ANSWER_OFFSET + FAILED_OFFSET) // WORD_BYTES] == sequence
        )

    def answer(self, sequence: int) -> None:
        """Let the GPU's stream go on that waits for an answer."""
        fence()
        self.words[(self.start_of(sequence) + ANSWER_OFFSET) // WORD_BYTES] = sequence

    def is_answered(self, sequence: int) -> bool:
        """Whether the answer is there, which was not yet taken."""
        slot = (sequence - 1) % self.num_slots
        return self.words[_FIRST_ANSWER + slot * _SLOT_WORDS] == sequence

    def oldest(self) -> int:
        """The first request without an answer, for any thread; 0: none."""
        first = max(1, self.sequence - self.num_slots + 1)
        for sequence in range(first, self.sequence + 1):
            if self._is_taken[(sequence - 1) % self.num_slots] and not self.is_answered(sequence):
                return sequence
        return 0

    def take_answer(self, sequence: int) -> None:
        """As `end`. Raises ExpertError if there is no output."""
        failure = self.end(sequence)
        if failure is None:
            return
        status, text, retry_after_ms, _ = failure
        if status == 499:
            raise ServerUnreachableError(f"channel: expected an answer, got: {text}", status)
        raise error_of(status, text, retry_after_ms / 1e3 if retry_after_ms else None)

    def end(self, sequence: int) -> Failure | None:
        """End a request whose answer is there; None if it has an output.

        Its slot can be used for another request afterwards.
        """
        fence()
        slot = (sequence - 1) % self.num_slots
        start = HEADER_BYTES + slot * SLOT_BYTES
        status, length, retry_after_ms, reason, _, _ = ANSWER.unpack_from(
            self._control, start + ANSWER_OFFSET + WORD_BYTES
        )
        if status == 200:
            self._is_taken[slot] = False
            return None
        error = bytes(self._control[start + ERROR_OFFSET : start + ERROR_OFFSET + length])
        self._is_taken[slot] = False  # last: another thread may write to it at once
        return Failure(status, error.decode(errors="replace"), retry_after_ms, reason)

    def times(self, sequence: int, waits: bool = True) -> tuple[float, float] | None:
        """Seconds in the queue and of the step, which follow an answer soon.

        None: the slot is used by a later request, or the channel has ended; or they are to come, and it does
        not wait.
        """
        words = self.words
        times = (self.start_of(sequence) + ANSWER_OFFSET + TIMES_OFFSET) // WORD_BYTES
        while words[times + 2] < sequence:
            if not waits or not self.is_alive():
                return None
        fence()
        queue, compute = words[times], words[times + 1]
        fence()
        # A later request of the slot changes them before it says so.
        is_own = words[times + 2] == sequence and self.sequence < sequence + self.num_slots
        return (queue / 1e9, compute / 1e9) if is_own else None

    def drop_answer(self, sequence: int) -> None:
        """End a request whose answer is there and nobody wants."""
        self._is_taken[(sequence - 1) % self.num_slots] = False

    def spin(self, sequence: int) -> bool:
        """Look for the answer for a moment; whether it is there."""
        words = self.words
        start = HEADER_BYTES + (sequence - 1) % self.num_slots * SLOT_BYTES
        word = (start + ANSWER_OFFSET) // WORD_BYTES
        if words[word] == sequence:
            return True
        if self._is_slow:
            return False
        now = time.perf_counter
        end = now() + self._spin_seconds
        while words[word] != sequence:
            if now() > end:
                return False
        return True

    def took(self, seconds: float) -> None:
        """A wait has taken so long: whether the next one spins."""
        self._is_slow = seconds > 2 * self._spin_seconds

    def clear(self) -> None:
        """Read all rings; afterwards, and only then, look for answers before the next `sleep`."""
        try:
            while (count := len(os.read(self.answers, _PIPE_BYTES))) == _PIPE_BYTES:
                pass
        except BlockingIOError:
            return
        if not count:
            self.is_open = False  # the server has closed it; all of its answers are there

    def sleep(self, seconds: float) -> bool:
        """Wait for the next ring; False if time is over. Clears `is_open` if the channel was closed."""
        found = self._poll.poll(1e3 * max(0.0, min(seconds, _MAX_POLL_SECONDS)))
        if found and not any(number == self.answers and events & select.POLLIN for number, events in found):
            self.is_open = False  # and every answer that was sent has been seen
        return bool(found)

    def is_alive(self) -> bool:
        """Whether the server still has the channel."""
        if self.is_open and self._asks.acquire(blocking=False):  # else another thread does
            try:
                if self._lost.poll(0):
                    self.is_open = False
            finally:
                self._asks.release()
        return self.is_open

    def closed_error(self) -> ServerUnreachableError:
        """The error of requests that will have no answer."""
        if self.is_closed:
            return ServerUnreachableError("channel: expected an open one, got a closed one", may_repeat=False)
        return ServerUnreachableError("channel: expected an answer, got none: the server has closed it")

    def hang_up(self) -> None:
        """End the connection, which wakes a thread in `sleep`; another one may `close` afterwards."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self, is_lost: bool = False) -> None:
        """Give the channel up. Nothing may wait for it. `is_lost`: because the server has."""
        self.is_open = False
        self.is_closed = self.is_closed or not is_lost
        bell, self._bell = self._bell, -1
        if bell >= 0:
            _links.discard(self)
            os.close(bell)
            os.close(self.answers)
            self.connection.close()

    def __del__(self) -> None:
        if getattr(self, "_bell", -1) >= 0:
            self.close()


_links: "weakref.WeakSet[ChannelClient]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close what a fork has copied."""
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_close_in_child)
