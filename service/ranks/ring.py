"""A ring of messages in shared memory, from one process to another: one writes, one reads, neither waits.

Word 0 of the memory is the number of messages that the reader has taken. Slot i has the message's sequence
number, which is written last, its size, and its bytes. All words have 8 bytes and are read and written at
once, as in the control memory of a channel.
"""

import os
import select
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from expertd_client.channel.fence import fence

_WORD = 8
_HEADER_WORDS = 16  # CPUs fetch pairs of lines: the reader's word is apart from the slots
_SLOT_WORDS = 2


class RingFullError(Exception):
    """All slots have messages that were not taken."""


class Bell:
    """An eventfd that wakes the one thread that waits for it. `ring` is safe from any thread and process.

    Events are edge-triggered: each `ring` ends one `wait`, also one that begins later, and nobody has to
    clear the eventfd.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._epoll: select.epoll | None = None

    def ring(self) -> None:
        """End the current or the next `wait`."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Forget past rings; for a descriptor that is polled in another way."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def wait(self, condition: Callable[[], bool], spin_seconds: float, seconds: float | None = None) -> bool:
        """Wait until `condition` holds, which must follow from a `ring`: awake at first, then asleep.

        Returns whether it holds; False only after `seconds`.
        """
        now = time.perf_counter()
        end, spin_until = None if seconds is None else now + seconds, now + spin_seconds
        while not condition():
            now = time.perf_counter()
            if now < spin_until:
                continue
            if end is not None and now >= end:
                return False
            self._sleep(None if end is None else end - now)
        return True

    def _sleep(self, seconds: float | None) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
            self._epoll.register(self.descriptor, select.EPOLLIN | select.EPOLLET)
        self._epoll.poll(seconds)


def ring_bytes(num_slots: int, slot_bytes: int) -> int:
    """The bytes of a ring's memory, for messages of up to `slot_bytes`."""
    return _WORD * (_HEADER_WORDS + num_slots * _slot_words(slot_bytes))


class Ring:
    """One process's side of a ring in `memory`, zeros at first. Each side belongs to one thread at a time."""

    def __init__(self, memory: memoryview, num_slots: int, slot_bytes: int) -> None:
        if len(memory) != (expected := ring_bytes(num_slots, slot_bytes)):
            raise ValueError(f"memory: expected {expected} bytes, got {len(memory)}")
        self._bytes = memory
        self._words = memory.cast("Q")
        self._num_slots, self._slot_bytes = num_slots, slot_bytes
        self._count = 0  # messages that this side has written or taken

    def put(self, message: bytes) -> None:
        """Write a message. Raises RingFullError, and ValueError for one that is too long."""
        if len(message) > self._slot_bytes:
            raise ValueError(f"message: expected at most {self._slot_bytes} bytes, got {len(message)}")
        if self._count - self._words[0] >= self._num_slots:
            raise RingFullError(f"ring: expected room for a message, got {self._num_slots} that nobody took")
        fence()  # the reader is done with the slot
        word = self._slot(self._count)
        start = _WORD * (word + _SLOT_WORDS)
        self._bytes[start : start + len(message)] = message
        self._words[word + 1] = len(message)
        fence()
        self._count += 1
        self._words[word] = self._count

    def is_empty(self) -> bool:
        """Whether `take` would return None."""
        return self._words[self._slot(self._count)] != self._count + 1

    def take(self) -> bytes | None:
        """The next message; None if it has not been written."""
        if self.is_empty():
            return None
        fence()
        word = self._slot(self._count)
        start = _WORD * (word + _SLOT_WORDS)
        message = bytes(self._bytes[start : start + min(self._words[word + 1], self._slot_bytes)])
        fence()
        self._count += 1
        self._words[0] = self._count
        return message

    def _slot(self, count: int) -> int:
        """The first word of the slot of message `count`, from 0 on."""
        return _HEADER_WORDS + count % self._num_slots * _slot_words(self._slot_bytes)


def _slot_words(slot_bytes: int) -> int:
    """Whole pairs of lines: the two sides touch neighbouring slots at the same time."""
    return -(-(_WORD * _SLOT_WORDS + slot_bytes) // 128) * 16
