"""A rank that is killed or stopped under traffic: nothing is lost, wrong or hung, and the ranks come back."""

import asyncio
import os
import signal
import time

import pytest

from tests.service.apps import error_of, tiny_settings
from tests.service.ranks.servers import rank_processes, serving_ranks
from tests.service.ranks.traffic import traffic_to
from tests.service.waiting import until

HOW = {signal.SIGKILL: "ended by SIGKILL", signal.SIGSTOP: "was stopped"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "losses"),
    [
        (2, [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]),
        (4, [(2, signal.SIGKILL)]),
    ],
)
async def test_a_lost_rank_costs_no_request_its_answer(
    ranks: int, losses: list[tuple[int, signal.Signals]]
) -> None:
    """One loss after another, each of ranks that have come back from the one before."""
    async with serving_ranks(tiny_settings(ranks=ranks)) as server, asyncio.timeout(60):
        for count, (rank, number) in enumerate(losses, 1):
            async with traffic_to(server) as traffic:
                before = rank_processes()
                os.kill(before[rank], number)
                began = time.perf_counter()
                await until(lambda: server.app.engine.why_not_ready() is not None)
                assert time.perf_counter() - began < 1.0
                ready = await server.http.get("/v2/health/ready")
                assert f"rank {rank}: its process {HOW[number]}" in error_of(ready, 503)
                assert (await server.http.get("/v2/health/live")).status_code == 200
                await traffic.flows_again()
            assert traffic.wrong == []
            assert traffic.refused > 0
            assert traffic.longest < 5.0
            assert not set(before) & set(rank_processes()), "the whole group is new"
            assert server.metric("rank_starts_total", rank="0") == 1 + count
            assert server.metric("step_failures_total", model="tiny") == 0
