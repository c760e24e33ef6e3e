"""Which messages may arrive: gRPC tells the size of one when all of it is there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from expertd.service.inference.errors import RequestError

_MIN_SECONDS = 2.0  # that a message may take to arrive while others wait for its place


class Arrivals:
    """Receives messages of unary calls, `max_messages` at a time; bytes of others wait with their senders.

    seconds  in which a message must arrive; while others wait, the one that takes longest has less
    """

    def __init__(self, max_messages: int, seconds: float) -> None:
        self.max_messages = max_messages
        self._seconds = seconds
        self._places = asyncio.Semaphore(max_messages)
        self._limits: dict[asyncio.Timeout, float] = {}  # of those that nobody waits for, and their beginning
        self._open: set[asyncio.Timeout] = set()
        self._is_stopped = False

    async def message(self, messages: AsyncIterator[bytes]) -> "Arrived":
        """The message of a call, which has a place until it is freed. Raises RequestError."""
        if self._places.locked():
            self._hurry()
        try:
            async with self._limit():
                await self._places.acquire()
        except TimeoutError:
            raise self.full("request", "messages that arrive") from None
        try:
            return Arrived(await self._received(messages), self._places.release)
        except BaseException:
            self._places.release()
            raise

    def stop(self) -> None:
        """Refuse every call whose message has not arrived yet: it was never accepted."""
        self._is_stopped = True
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(0)

    def full(self, subject: str, what: str) -> RequestError:
        """There is no room for one more."""
        text = (
            f"{subject}: expected at most {self.max_messages} {what}, by limits.max_buffered_bytes, got more"
        )
        return RequestError(text, reason="memory_full", retry_after=1)

    def _hurry(self) -> None:
        """Let the message that has taken longest give its place away, unless it is there soon."""
        for limit, began in self._limits.items():
            del self._limits[limit]
            until = limit.when()
            if until is not None and not limit.expired():
                limit.reschedule(min(until, began + _MIN_SECONDS))
            return

    async def _received(self, messages: AsyncIterator[bytes]) -> bytes:
        began = asyncio.get_running_loop().time()
        try:
            async with self._limit() as limit:
                self._limits[limit] = began
                try:
                    generator: Any = aiter(messages)
                    async with aclosing(generator):  # which would keep the message
                        message: bytes = await anext(generator)
                        return message
                finally:
                    self._limits.pop(limit, None)
        except StopAsyncIteration:
            raise RequestError("request: expected a message, got none") from None
        except TimeoutError:
            seconds = round(asyncio.get_running_loop().time() - began, 2)
            text = f"request: expected the whole message within {seconds:g} s, got a part of it"
            raise RequestError(text, reason="body_timeout") from None

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[asyncio.Timeout]:
        """The time for a message to arrive. Raises TimeoutError after it, RequestError if the server ends."""
        if self._is_stopped:
            raise _ending()
        try:
            async with asyncio.timeout(self._seconds) as limit:
                self._open.add(limit)
                try:
                    yield limit
                finally:
                    self._open.discard(limit)
        except TimeoutError:
            if self._is_stopped:
                raise _ending() from None
            raise


class Arrived:
    """A message, and its place, which others wait for while its bytes are there."""

    def __init__(self, data: bytes, release: Callable[[], None]) -> None:
        self.data = data
        self._release: Callable[[], None] | None = release

    def take(self) -> bytes:
        """The message, which this forgets."""
        data, self.data = self.data, b""
        return data

    def free(self) -> None:
        """Give the place to another message: the bytes of this one are copied, or dropped."""
        if self._release is not None:
            release, self._release = self._release, None
            release()


def _ending() -> RequestError:
    text = "the server is shutting down, and the message had not arrived"
    return RequestError(text, reason="shutting_down")
