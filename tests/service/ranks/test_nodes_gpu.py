"""Two nodes on loopback, with a GPU each, which exchange tokens by NCCL: answers, and ranks that are lost."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.service.apps import Serving, rows, serving, tiny_settings
from tests.service.ranks.nodes import Agent, agent, node_settings
from tests.service.ranks.servers import close, output_for, rank_processes, serving_ranks
from tests.service.ranks.steps import routed
from tests.service.ranks.test_devices_gpu import LAYER, LIMITS, answers, bf16_output, inputs, slots_of
from tests.service.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TOLERANCES = {"FP32": 2e-5, "BF16": 2**-7}  # in BF16 each rank's sum is rounded, and the output


@asynccontextmanager
async def nodes(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Serving, Agent]]:
    """The front end of node 0 with GPU 0, and the agent of node 1 with GPU 1."""
    common = {"backend": "hopper", "rendezvous_timeout_seconds": 120, **changes}
    settings = node_settings({**LIMITS, "max_queue_tokens": 4096}, devices="0", **common)
    with agent(settings.model_copy(update={"devices": "1"}), tmp_path) as other:
        async with serving_ranks(settings) as server:
            yield server, other


CASES = [(given, datatype) for given in (False, True) for datatype in ("FP32", "BF16")]


async def test_answers_are_those_of_one_gpu(tmp_path: Path) -> None:
    values = inputs()
    async with serving(tiny_settings(LIMITS, backend="hopper", models=[LAYER])) as one:
        expected = {case: [await bf16_output(one, value, *case) for value in values] for case in CASES}
    async with nodes(tmp_path, models=[LAYER]) as (server, other):
        assert len(other.ranks()) == 1
        assert len(rank_processes()) == 2, "its own rank, and a proxy"
        for case, outputs in expected.items():
            alone = [await bf16_output(server, value, *case) for value in values]
            together = await asyncio.gather(*(bf16_output(server, value, *case) for value in values))
            for one_gpu, *got in zip(outputs, alone, together, strict=True):
                for output in got:
                    difference = np.abs(output - one_gpu).max() / np.abs(one_gpu).max()
                    assert difference <= TOLERANCES[case[1]], (case, len(output), difference)
        assert all(server.metric("rank_expert_tokens_total", rank=rank) for rank in "01")


async def test_experts_in_the_hosts_memory_give_the_same_bits(tmp_path: Path) -> None:
    settings = tiny_settings(LIMITS, backend="hopper", models=[LAYER], devices="0-1")
    values, outputs = inputs(), list[list[Any]]()
    for budget in (None, slots_of(settings, 8)):
        async with nodes(tmp_path, models=[LAYER], weights_budget=budget) as (server, _):
            got = [await bf16_output(server, value, *case) for case in CASES for value in values]
            outputs.append([*got, *[await output_for(server, value) for value in values]])
            if budget is not None:
                assert all(server.metric("rank_expert_store_misses_total", rank=rank) for rank in "01")
    for whole, stored in zip(*outputs, strict=True):
        assert np.array_equal(whole, stored), len(whole)


async def test_given_routing_of_fp32_tokens(tmp_path: Path) -> None:
    async with serving(tiny_settings(LIMITS, backend="hopper")) as one:
        expected = [await routed(one, rows(count), "INT64") for count in (1, 33)]
    async with nodes(tmp_path) as (server, _):
        for count, wanted in zip((1, 33), expected, strict=True):
            assert close(await routed(server, rows(count), "INT64"), wanted)


def kill_a_rank_of_node_1(other: Agent) -> None:
    os.kill(other.ranks()[0], signal.SIGKILL)


def kill_the_rank_of_node_0(other: Agent) -> None:
    os.kill(rank_processes()[0], signal.SIGKILL)


@pytest.mark.parametrize("lose", [kill_a_rank_of_node_1, kill_the_rank_of_node_0])
async def test_a_killed_rank_comes_back(lose: Callable[[Agent], None], tmp_path: Path) -> None:
    async with nodes(tmp_path) as (server, other):
        expected = await output_for(server, rows(8))
        lose(other)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        await until(lambda: server.app.engine.why_not_ready() is None)
        assert np.array_equal(await output_for(server, rows(8)), expected), "the same bits"
        await answers(server)
