"""ModelStreamInfer: requests of one stream, computed beside each other and answered in their order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

_MAX_WAITING = 8  # requests of a stream whose answers are not sent yet; further ones are not received


class Stream:
    """Has `answer` answer each of `messages`; it raises nothing."""

    def __init__(self, messages: AsyncIterator[bytes], answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._messages = messages
        self._answer = answer
        self._answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._room = asyncio.Semaphore(_MAX_WAITING)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def run(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write every answer; cancelled, it leaves the requests."""
        try:
            while (task := await self._answers.get()) is not None:
                await write(await task)
                self._room.release()
        finally:
            self._reading.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(self._reading, *self._tasks, return_exceptions=True)

    def end(self) -> None:
        """Receive no more; `run` returns when all that was received is answered."""
        self._reading.cancel()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for message in self._messages:
                task = loop.create_task(_awaited(self._answer(message)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._answers.put_nowait(task)
                await self._room.acquire()
        finally:
            self._answers.put_nowait(None)


async def _awaited(answer: Awaitable[bytes]) -> bytes:
    return await answer
