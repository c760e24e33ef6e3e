"""ModelStreamInfer: requests of one stream, computed beside each other and answered in their order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from expertd.service.grpc.arrivals import Arrived
from expertd.service.inference.errors import RequestError

_MAX_WAITING = 8  # requests of a stream whose answers are not sent yet; further ones are not received


class StreamCall:
    """Has `answer` answer each of `messages`; it raises nothing, and frees each once it is copied.

    is_cut        it was ended before its client did
    idle_seconds  in which the next message must be there if none is being answered, and an answer received
    """

    def __init__(
        self,
        messages: AsyncIterator[bytes],
        answer: Callable[[Arrived], Awaitable[bytes]],
        idle_seconds: float,
    ) -> None:
        self.is_cut = False
        self._messages = messages
        self._answer = answer
        self._idle_seconds = idle_seconds
        self._answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._room = asyncio.Semaphore(_MAX_WAITING)
        self._limit: asyncio.Timeout | None = None  # of the next message
        self._error: RequestError | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())
        self._reading.add_done_callback(lambda _: self._answers.put_nowait(None))

    async def run(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write every answer; cancelled, it leaves the requests. Raises RequestError for an idle stream."""
        try:
            while (task := await self._answers.get()) is not None:
                await self._written(write, await task)
                self._room.release()
        finally:
            self._reading.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(self._reading, *self._tasks, return_exceptions=True)
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Receive no more; `run` returns when all that was received is answered."""
        self.is_cut = self._reading.cancel()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._room.acquire()
                is_copied = asyncio.Event()  # before that, no other message is received
                task = loop.create_task(self._result(Arrived(await self._next(), is_copied.set)))
                self._tasks.add(task)
                task.add_done_callback(self._answered)
                self._answers.put_nowait(task)
                await is_copied.wait()
        except StopAsyncIteration:
            pass
        except TimeoutError:
            text = f"stream: expected the next request within {self._idle_seconds:g} s, got none"
            self._error = RequestError(text, reason="body_timeout")

    async def _result(self, message: Arrived) -> bytes:
        try:
            return await self._answer(message)  # not begun at all if the stream is cancelled before
        finally:
            message.free()

    async def _next(self) -> bytes:
        async with asyncio.timeout(None if self._tasks else self._idle_seconds) as self._limit:
            try:
                return await anext(self._messages)
            finally:
                self._limit = None

    def _answered(self, task: asyncio.Task[bytes]) -> None:
        """The client may take its time until nothing is left to be answered."""
        self._tasks.discard(task)
        if self._limit is not None and not self._tasks and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._idle_seconds)

    async def _written(self, write: Callable[[bytes], Awaitable[object]], answer: bytes) -> None:
        try:
            async with asyncio.timeout(self._idle_seconds):
                await write(answer)
        except TimeoutError:
            text = f"stream: expected an answer to be received within {self._idle_seconds:g} s, got a part"
            raise RequestError(text, reason="body_timeout") from None
