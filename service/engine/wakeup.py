"""Where the worker thread waits: for a wake-up by another thread, and for sources of requests."""

import os
import select
import threading
import time
import weakref
from typing import Protocol

_MAX_EVENTS = 64  # of one call; further ones are in the next
# (seconds without a request, pause between two looks until then) for what a caller's GPU will write: it may
# have other work for long, or none. A look takes some 0.1 ms of a CPU, as it begins with a wake-up.
_PAUSES = (1.0, 50e-6), (10.0, 1e-3), (60.0, 5e-3)
_LAST_PAUSE = 20e-3


class RequestSource(Protocol):
    """Where requests arrive without the event loop, such as a channel. Its methods must not raise."""

    lane: int  # of its last request

    def fileno(self) -> int:
        """An eventfd that a caller adds to when it has written a request; nobody needs to read it."""

    def poll(self) -> None:
        """Submit the requests that have arrived; called after each ring, on the worker thread or another."""

    def is_awaited(self) -> bool:
        """Whether a request will come without a ring, because the caller's GPU writes it."""

    def has_arrived(self) -> bool:
        """Whether it is there."""


def _pause(silence: float) -> float:
    """Seconds between two looks, by those in which nothing has come."""
    return next((pause for seconds, pause in _PAUSES if silence < seconds), _LAST_PAUSE)


class Wakeup:
    """An epoll of one eventfd of its own and one of each source. Safe from any thread, but for `wait`.

    Events are edge-triggered: each addition to an eventfd is reported once, also one from before it was
    registered, so no wake-up is lost and no eventfd has to be cleared.

    rings_wake  whether sources end a `wait` that sleeps; else only those see them that do not
    """

    def __init__(self, rings_wake: bool = True) -> None:
        self._epoll = select.epoll()
        self._asleep = self._epoll if rings_wake else select.epoll()
        self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._own)  # not in `close`: another thread may be about to write
        self.sources: dict[int, RequestSource] = {}  # by descriptor
        self._rang: list[RequestSource] = []  # in the last `wait`: polled since
        self._awaited: list[RequestSource] = []
        self._news = 0.0  # when something has happened last
        self._lock = threading.Lock()
        for epoll in {self._epoll, self._asleep}:
            epoll.register(self._own, select.EPOLLIN | select.EPOLLET)

    def add(self, source: RequestSource) -> None:
        """Poll `source` from now on, also if a request arrived before."""
        with self._lock:
            self.sources[source.fileno()] = source
            self._epoll.register(source.fileno(), select.EPOLLIN | select.EPOLLET)

    def remove(self, source: RequestSource) -> None:
        """Forget `source`, whose eventfd is still open; a poll of it that has begun may still run."""
        with self._lock:
            if self.sources.pop(source.fileno(), None) is not None:
                # Closing would not be enough: the caller has a descriptor of the same eventfd.
                self._epoll.unregister(source.fileno())

    def all(self) -> list[RequestSource]:
        """The present sources."""
        with self._lock:
            return list(self.sources.values())

    def wake(self) -> None:
        """End the current or the next `wait`."""
        os.eventfd_write(self._own, 1)

    def wait(self, seconds: float | None) -> list[RequestSource] | None:
        """Wait up to `seconds` (None: without end); the sources that rang, None if nothing happened."""
        if self._rang:
            self._awaited = list(dict.fromkeys((*self._awaited, *self._rang)))
            self._rang = []
        epoll = self._epoll if seconds == 0 else self._asleep
        may_look = seconds is None and self._asleep is self._epoll
        while True:
            self._awaited = [source for source in self._awaited if source.is_awaited()]
            arrived = [source for source in self._awaited if source.has_arrived()]
            looks = may_look and bool(self._awaited)
            events = epoll.poll(0 if arrived or looks else seconds, _MAX_EVENTS)
            if events or arrived or not looks:
                break
            select.select((epoll,), (), (), _pause(time.perf_counter() - self._news))
        if not (events or arrived):
            return None
        self._news = time.perf_counter()
        rang = dict.fromkeys((*arrived, *(self.sources.get(descriptor) for descriptor, _ in events)))
        self._rang = [source for source in rang if source is not None]
        return self._rang

    def close(self) -> None:
        """End the waiting for good; `wake` does nothing from now on."""
        with self._lock:
            self.sources.clear()
            self._epoll.close()
            self._asleep.close()
