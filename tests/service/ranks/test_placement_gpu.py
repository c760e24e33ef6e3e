"""Experts that change their GPUs while steps run."""

import asyncio

import numpy as np
import pytest
import torch

from expertd.backends import BACKENDS
from expertd.service.engine.memory_needs import expert_slots
from tests.service.apps import serving, tiny_settings
from tests.service.ranks.placing import change, held
from tests.service.ranks.servers import serving_ranks
from tests.service.ranks.test_devices_gpu import (
    DEVICES,
    LAYER,
    LIMITS,
    RANKS,
    bf16_output,
    inputs,
    slots_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("stored", [False, True])
async def test_answers_stay_right_while_experts_move(stored: bool) -> None:
    """Also of experts in the hosts' memory, some of which are in slots of the GPUs."""
    values = inputs()
    async with serving(tiny_settings(LIMITS, backend="hopper", models=[LAYER])) as one:
        expected = [await bf16_output(one, value, given=False) for value in values]
    settings = tiny_settings(
        LIMITS,
        backend="hopper",
        models=[LAYER],
        devices=DEVICES,
        placement={"policy": "static", "replicas": 8},
    )
    if stored:
        settings = settings.model_copy(update={"weights_budget": slots_of(settings, 8)})
        assert expert_slots(settings, BACKENDS["hopper"]) == {"tiny": 8}
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        random = np.random.default_rng()
        for _ in range(4):
            experts = random.permutation(np.append(np.arange(32), random.integers(0, 32, 8)))
            ranks = experts.reshape(RANKS, 40 // RANKS).tolist()
            moving = asyncio.create_task(change(server, action="pin", model="tiny", ranks=ranks))
            while not moving.done():
                for value, wanted in zip(values, expected, strict=True):
                    got = await bf16_output(server, value, given=False)
                    assert np.array_equal(got, wanted), len(value)
            assert held(await moving) == [sorted(rank) for rank in ranks]
        layer = await change(server, action="rebalance")
        assert layer["max_over_mean"] <= 1.05
        assert np.array_equal(await bf16_output(server, values[3], given=False), expected[3])
        if stored:
            assert server.metric("expert_store_misses_total", model="tiny") > 0
