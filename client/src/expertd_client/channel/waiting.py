"""Threads that wait for answers of one channel: one of them listens for all."""

import threading
import time

from expertd_client.channel.link import Link
from expertd_client.deadline import Deadline

_MAX_SECONDS = 1e6


class Waiters:
    """The server's rings do not say whose answer they announce, so the listener looks for everybody's."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._is_listened = False
        self._others: dict[int, threading.Lock] = {}  # request -> held until there is news for its thread

    def wait(self, sequence: int, deadline: Deadline, spins: bool) -> None:
        """Until the answer is there. Raises ServerUnreachableError if it will not come, DeadlineError."""
        link = self._link
        began = time.perf_counter()
        if not (spins and link.spin(sequence)):
            while not link.is_answered(sequence):
                if not link.is_open:
                    raise link.closed_error()
                try:
                    self._wait_once(sequence, deadline)
                finally:
                    self._pass_on()
        link.took(time.perf_counter() - began)

    def _wait_once(self, sequence: int, deadline: Deadline) -> None:
        news = threading.Lock()
        with self._lock:
            listens = not self._is_listened
            if listens:
                self._is_listened = True
            elif self._link.is_answered(sequence):
                return  # before the listener could know of this thread
            else:
                news.acquire()
                self._others[sequence] = news
        try:
            if listens:
                self._listen(sequence, deadline)
            elif not news.acquire(timeout=min(deadline.check(), _MAX_SECONDS)):
                deadline.check()
        finally:
            with self._lock:
                if listens:
                    self._is_listened = False
                else:
                    self._others.pop(sequence, None)

    def _listen(self, sequence: int, deadline: Deadline) -> None:
        link = self._link
        while True:
            link.clear()
            with self._lock:
                for other in [other for other in self._others if link.is_answered(other)]:
                    self._others.pop(other).release()
            if link.is_answered(sequence) or not link.is_open:
                return
            link.sleep(deadline.check())

    def _pass_on(self) -> None:
        """Let another thread listen, or all find out that the channel is closed."""
        with self._lock:
            while self._others and not self._is_listened:
                self._others.popitem()[1].release()
                if self._link.is_open:
                    return
