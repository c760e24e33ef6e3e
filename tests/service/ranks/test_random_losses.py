"""Ranks that are killed and stopped at random under traffic: no request is lost, wrong or hung.

KILLING_SECONDS says for how long, in each test: 5 by default, 60 for a change to ranks.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.service.apps import tiny_settings
from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.servers import rank_processes, serving_ranks
from tests.service.ranks.traffic import Traffic, traffic_to

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

_SECONDS = float(os.environ.get("KILLING_SECONDS", "5"))


async def lose_at_random(processes: Callable[[], list[int]]) -> int:
    """Kill or stop one process after another, also while they start; the number of signals."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    until, count = time.monotonic() + _SECONDS, 0
    while time.monotonic() < until:
        await asyncio.sleep(generator.choice([generator.uniform(0.0, 0.5), generator.uniform(2.0, 6.0)]))
        if running := processes():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(generator.choice(running), generator.choice([signal.SIGKILL, signal.SIGSTOP]))
                count += 1
    return count


def check(traffic: Traffic, losses: int) -> None:
    """Nothing lost: every caller has an answer to each request, else the test could not end."""
    print(f"signals {losses}, right {traffic.right}, refused {traffic.refused}")
    assert losses > 0
    assert traffic.refused > 0
    assert traffic.wrong == []


@pytest.mark.timeout(300 + 2 * _SECONDS)
async def test_losses_on_one_node() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, traffic_to(server) as traffic:
        losses = await lose_at_random(rank_processes)
        await traffic.flows_again()
    check(traffic, losses)


@pytest.mark.timeout(300 + 2 * _SECONDS)
async def test_losses_on_two_nodes(tmp_path: Path) -> None:
    settings = node_settings()
    with agent(settings, tmp_path) as other:
        async with serving_ranks(settings) as server, traffic_to(server) as traffic:
            losses = await lose_at_random(lambda: [*rank_processes(), *other.ranks()])
            await traffic.flows_again()
        check(traffic, losses)
