"""The trace of ranks on GPUs: each has its process and its GPU, with kernels."""

import asyncio
import json

import pytest
import torch

from tests.service.apps import rows, tiny_settings
from tests.service.ranks.servers import output_for, serving_ranks
from tests.service.ranks.test_devices_gpu import DEVICES, LAYER, LIMITS, RANKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


async def test_each_ranks_kernels_are_in_the_trace() -> None:
    settings = tiny_settings(LIMITS, models=[LAYER], backend="hopper", devices=DEVICES)
    async with serving_ranks(settings) as server:

        async def load() -> None:
            for _ in range(100):
                await output_for(server, rows(64).repeat(8, axis=1))

        await output_for(server, rows(64).repeat(8, axis=1))
        asked = server.http.post("/v1/profile", json={"steps": 20, "seconds": 20}, timeout=60)
        response, _ = await asyncio.gather(asked, load())
    assert response.status_code == 200, response.text
    events = json.loads(response.content)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    with_kernels = {names[event["pid"]] for event in events if event.get("cat") == "kernel"}
    assert with_kernels == {f"rank {rank}: GPU {rank}" for rank in range(RANKS)}
    assert set(names.values()) >= {"front end: CPU", *(f"rank {rank}: CPU" for rank in range(RANKS))}
