"""Callers that ask a server without end, and count what they were told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.service.apps import Serving, hidden_request, output_of, rows
from tests.service.ranks.servers import close
from tests.service.waiting import until

_HUNG_SECONDS = 60.0  # a request that takes longer hangs


@dataclass
class Traffic:
    """Callers that ask again at once, and what they were told; `wrong` has what they should not have been."""

    server: Serving
    is_right: Callable[[NDArray[np.float32], NDArray[np.float32]], bool]
    right: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    stopped: bool = False

    async def call(self, body: tuple[bytes, int], expected: NDArray[np.float32]) -> None:
        """One caller."""
        while not self.stopped:
            async with asyncio.timeout(_HUNG_SECONDS):
                response = await self.server.infer(*body)
            self._count(response, expected)
            await asyncio.sleep(0.01 if response.status_code == 503 else 0)

    def _count(self, response: httpx.Response, expected: NDArray[np.float32]) -> None:
        if response.status_code == 200 and self.is_right(output_of(response), expected):
            self.right += 1
        elif response.status_code == 503 and response.headers["retry-after"] == "1":
            self.refused += 1
        else:
            self.wrong.append(f"{response.status_code}: {response.text[:200]!r}")

    async def more(self) -> None:
        """Wait for some more right answers."""
        wanted = self.right + 20
        await until(lambda: self.right >= wanted or bool(self.wrong))

    async def flows_again(self) -> None:
        """Wait until the server is ready, and has answered more."""
        await until(lambda: self.server.app.engine.why_not_ready() is None)
        await self.more()


@asynccontextmanager
async def traffic_to(
    server: Serving,
    bodies: Sequence[tuple[bytes, int]] = (),
    is_right: Callable[[NDArray[np.float32], NDArray[np.float32]], bool] = close,
) -> AsyncIterator[Traffic]:
    """Callers with different requests, which have had answers before the block, and have ended after it."""
    bodies = bodies or [hidden_request(rows(tokens, seed=tokens)) for tokens in range(1, 5)]
    traffic = Traffic(server, is_right)
    expected = [output_of(await server.infer(*body)) for body in bodies]
    callers = [asyncio.create_task(traffic.call(*pair)) for pair in zip(bodies, expected, strict=True)]
    try:
        await traffic.more()
        yield traffic
    finally:
        traffic.stopped = True
        await asyncio.gather(*callers)
