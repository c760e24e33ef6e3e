"""Waiting for answers of one channel: threads, one of which listens for all, and tasks of an event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from expertd_client.channel.link import ChannelClient
from expertd_client.deadline import Deadline
from expertd_client.steps import settle, settled

_MAX_SECONDS = 1e6


class Waiters:
    """Who waits for answers of a link: threads, and tasks of one event loop. `on_news`: as in TaskWaiters."""

    def __init__(self, link: ChannelClient, on_news: Callable[[], None] = lambda: None) -> None:
        self.link = link
        self.threads = ThreadWaiters(link)
        self._tasks: TaskWaiters | None = None
        self._on_news = on_news

    @property
    def tasks(self) -> "TaskWaiters":
        """To be used in an event loop, always in the same."""
        if self._tasks is None:
            self._tasks = TaskWaiters(self.link, self._on_news)
        return self._tasks

    def are_here(self) -> bool:
        """Whether tasks of the running event loop may wait, and threads if none runs."""
        return self._tasks is None or self._tasks.loop is asyncio.get_running_loop()

    def taken(self, sequence: int) -> None:
        """As TaskWaiters.taken."""
        if self._tasks is not None:
            self._tasks.taken(sequence)

    def close(self, is_lost: bool = False) -> None:
        """Close the link, and wake the tasks that wait."""
        if self._tasks is not None:
            self._tasks.stop()
        self.link.close(is_lost)


@dataclass(slots=True)
class AnswerWait:
    """Until a request has its answer. Raises ServerUnreachableError if it will not come, DeadlineError."""

    waiters: Waiters
    sequence: int
    deadline: Deadline
    spins: bool = True

    def in_thread(self) -> None:
        """As Wait.in_thread."""
        self.waiters.threads.wait(self.sequence, self.deadline, self.spins)

    async def in_loop(self) -> None:
        """As Wait.in_loop."""
        await self.waiters.tasks.wait(self.sequence, self.deadline)

    def is_over(self) -> bool:
        """As Wait.is_over."""
        link = self.waiters.link
        return link.is_answered(self.sequence) or not link.is_alive() or self.deadline.remaining() <= 0


class ThreadWaiters:
    """The server's rings do not say whose answer they announce, so the listener looks for everybody's."""

    def __init__(self, link: ChannelClient) -> None:
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


class TaskWaiters:
    """Tasks of the running event loop, which watches the channel until `stop`.

    `on_news` is called whenever the server has rung, and at the channel's end.
    """

    def __init__(self, link: ChannelClient, on_news: Callable[[], None] = lambda: None) -> None:
        self.loop = asyncio.get_running_loop()
        self._link = link
        self._on_news = on_news
        self._waiting: dict[asyncio.Future[bool], int] = {}  # -> request; the result: whether it is answered
        self._is_watched = True
        self.loop.add_reader(link.answers, self._look)
        self.loop.add_reader(link.connection, self._end)

    async def wait(self, sequence: int, deadline: Deadline) -> None:
        """Until the answer is there. Raises ServerUnreachableError if it will not come, DeadlineError."""
        link = self._link
        if link.is_answered(sequence):
            return
        if not link.is_open:
            raise link.closed_error()
        left = deadline.check()
        ready: asyncio.Future[bool] = self.loop.create_future()
        self._waiting[ready] = sequence
        try:
            # Its result, not another look: another task may have taken the answer since.
            if not await settled(ready, left, False) and not link.is_answered(sequence):
                raise deadline.error() if link.is_open else link.closed_error()
        finally:
            del self._waiting[ready]

    def taken(self, sequence: int) -> None:
        """Wake the tasks that wait for this answer: a later one may be in its place when the loop looks."""
        for ready, waited in self._waiting.items():
            if waited == sequence:
                settle(ready, True)

    def stop(self) -> None:
        """Watch the channel no more, which is about to be closed, and wake all tasks that wait."""
        if self._is_watched and not self._link.is_closed:
            with suppress(RuntimeError):  # of a closed event loop
                self.loop.remove_reader(self._link.answers)
                self.loop.remove_reader(self._link.connection)
        self._is_watched = False
        for ready in self._waiting:
            settle(ready, False)

    def _look(self) -> None:
        """The server has rung: wake the tasks that have an answer."""
        self._link.clear()
        for ready, sequence in self._waiting.items():
            if self._link.is_answered(sequence):
                settle(ready, True)
        if self._link.is_open:
            self._on_news()
        else:
            self._end()

    def _end(self) -> None:
        """The server has closed the channel."""
        self._link.is_open = False
        self.stop()
        self._on_news()
