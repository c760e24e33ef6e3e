"""A rank that is killed or stopped under traffic: nothing is lost, wrong or hung, and the ranks come back."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.apps import Serving, error_of, hidden_request, output_of, rows, tiny_settings
from tests.service.ranks.servers import close, output_for, rank_processes, serving_ranks
from tests.service.waiting import until

_CALLERS = 4


@dataclass
class Traffic:
    """Callers that ask again at once, and what they were told; `wrong` has what they should not have been."""

    server: Serving
    right: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0
    stopped: bool = False

    async def call(self, values: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """One caller."""
        body = hidden_request(values)
        while not self.stopped:
            began = time.perf_counter()
            response = await self.server.infer(*body)
            self.longest = max(self.longest, time.perf_counter() - began)
            self._count(response, expected)
            await asyncio.sleep(0.01 if response.status_code == 503 else 0)

    def _count(self, response: httpx.Response, expected: NDArray[np.float32]) -> None:
        if response.status_code == 200 and close(output_of(response), expected):
            self.right += 1
        elif response.status_code == 503 and response.headers["retry-after"] == "1":
            self.refused += 1
        else:
            self.wrong.append(f"{response.status_code}: {response.text[:200]!r}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "number"),
    [
        (2, 0, signal.SIGKILL),
        (2, 1, signal.SIGKILL),
        (2, 0, signal.SIGSTOP),
        (2, 1, signal.SIGSTOP),
        (4, 2, signal.SIGKILL),
    ],
)
async def test_a_lost_rank_costs_no_request_its_answer(ranks: int, rank: int, number: signal.Signals) -> None:
    async with serving_ranks(tiny_settings(ranks=ranks)) as server, asyncio.timeout(60):
        values = [rows(tokens, seed=tokens) for tokens in range(1, _CALLERS + 1)]
        traffic = Traffic(server)
        expected = [await output_for(server, each) for each in values]
        callers = [asyncio.create_task(traffic.call(*pair)) for pair in zip(values, expected, strict=True)]
        await until(lambda: traffic.right > 20)
        before = rank_processes()
        os.kill(before[rank], number)
        began = time.perf_counter()
        await until(lambda: server.app.engine.why_not_ready() is not None)
        assert time.perf_counter() - began < 1.0
        ready = await server.http.get("/v2/health/ready")
        assert f"rank {rank}: its process " in error_of(ready, 503)
        assert (await server.http.get("/v2/health/live")).status_code == 200
        await until(lambda: server.app.engine.why_not_ready() is None, 30)
        answered = traffic.right
        await until(lambda: traffic.right > answered + 20)
        traffic.stopped = True
        await asyncio.gather(*callers)
        assert traffic.wrong == []
        assert traffic.refused > 0
        assert traffic.longest < 5.0
        assert not set(before) & set(rank_processes()), "the whole group is new"
        assert server.metric("rank_starts_total", rank="0") == 2
        assert server.metric("step_failures_total", model="tiny") == 0
