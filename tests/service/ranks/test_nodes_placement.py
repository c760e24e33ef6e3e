"""Experts that move between nodes, under traffic."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.placing import ONE_EACH, SMALL, Traffic, change, held, routed, uniform
from tests.service.ranks.servers import serving_ranks


@pytest.mark.slow
async def test_answers_keep_their_bits_while_experts_change_nodes(tmp_path: Path) -> None:
    settings = node_settings(ONE_EACH, models=[SMALL], placement={"policy": "static"})
    with agent(settings, tmp_path):
        async with serving_ranks(settings) as server, asyncio.timeout(60):
            async with Traffic(server, [routed(uniform(256, seed), seed) for seed in range(3)]) as traffic:
                for seed in range(4):
                    ranks = np.random.default_rng(seed).permutation(8).reshape(2, 4).tolist()
                    layer = await change(server, action="pin", model="tiny", ranks=ranks)
                    assert held(layer) == [sorted(rank) for rank in ranks]
                    await traffic.more()
            assert traffic.wrong == []
            assert traffic.refused == 0
            assert layer["moves"] > 0
