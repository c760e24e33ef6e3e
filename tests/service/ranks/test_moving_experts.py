"""Experts that change their ranks under traffic, and while ranks are lost."""

import asyncio
import logging
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from expertd.service.engine.errors import DeviceLostError
from expertd.service.moe.placement import Placement
from expertd.service.moe.placement.rounds import Fetch
from expertd.service.ranks.front import balancer
from expertd.service.ranks.front.balancer import Balancer
from expertd.service.ranks.messages import Kind, MoveCommand
from tests.service.apps import Serving, error_of, output_of, rows, tiny_settings
from tests.service.moe.placement.greedy import chosen_replicas
from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.placing import (
    EXPERTS,
    ONE_EACH,
    SMALL,
    STATIC,
    change,
    held,
    placement,
    routed,
    skewed,
    uniform,
)
from tests.service.ranks.servers import close, output_for, rank_processes, serving_ranks
from tests.service.ranks.traffic import traffic_to
from tests.service.waiting import until

pytestmark = pytest.mark.slow  # each server starts processes


@pytest.mark.parametrize("num_nodes", [1, 2])
async def test_answers_keep_their_bits_across_changes_under_traffic(num_nodes: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"models": [SMALL], "placement": {"policy": "static"}}
    with ExitStack() as stack:
        if num_nodes == 1:
            settings = tiny_settings(ONE_EACH, ranks=2, **given)
        else:
            settings = node_settings(ONE_EACH, **given)
            stack.enter_context(agent(settings, tmp_path))
        async with serving_ranks(settings) as server, asyncio.timeout(60):
            bodies = [routed(uniform(256, seed), seed) for seed in range(3)]
            async with traffic_to(server, bodies, np.array_equal) as traffic:
                for seed in range(5):
                    ranks = np.random.default_rng(seed).permutation(8).reshape(2, 4).tolist()
                    layer = await change(server, action="pin", model="tiny", ranks=ranks)
                    assert held(layer) == [sorted(rank) for rank in ranks]
                    assert layer["pinned"]
                    await traffic.more()
            assert traffic.wrong == []
            assert traffic.refused == 0
            assert layer["moves"] > 0
            assert server.metric("step_failures_total", model="tiny") == 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
async def test_a_rank_that_is_killed_during_a_move(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or wrong, and the ranks come back with the placement that the server shows."""
    monkeypatch.setattr(balancer.SliceSize, "note", lambda *_: None)
    monkeypatch.setattr(balancer, "_FIRST_BYTES", 1024)  # so that there is time to kill
    settings = tiny_settings(ONE_EACH, ranks=2, models=[{**SMALL, "num_experts": EXPERTS}], placement=STATIC)
    backwards = [[*range(63, 31, -1), *range(4)], [*range(31, -1, -1), *range(4)]]
    pin = {"action": "pin", "model": "tiny", "ranks": backwards}
    async with serving_ranks(settings) as server, asyncio.timeout(60):
        ids = skewed(256, 0)
        async with traffic_to(server, [routed(ids)], np.array_equal) as traffic:
            moving = asyncio.create_task(server.http.post("/v1/placement", json=pin))
            await until(lambda: server.metric("placement_moves_total", model="tiny") > 4)
            assert (await placement(server))["moving"]
            os.kill(rank_processes()[rank], signal.SIGKILL)
            assert "its process ended by SIGKILL" in error_of(await moving, 503)
            assert (await moving).headers["retry-after"] == "1"
            await until(lambda: server.app.engine.why_not_ready() is None, 30)
            await traffic.more()
        assert traffic.wrong == []
        assert server.metric("placement_failures_total") == 1
        shown = (await placement(server))["models"]["tiny"]
        assert 4 < shown["moves"] < 64
        assert held(shown) != [sorted(experts) for experts in backwards]
        await check_tokens_of_ranks(server, ids, shown)
        monkeypatch.undo()
        layer = await change(server, **pin)
        assert held(layer) == [sorted(experts) for experts in backwards]
        await check_tokens_of_ranks(server, ids, layer)


async def test_a_move_that_fails_on_one_rank_starts_all_again(caplog: pytest.LogCaptureFixture) -> None:
    """Changes are refused meanwhile, and a pinned placement stays."""
    settings = tiny_settings(ranks=2, models=[SMALL], placement={"policy": "static"})
    halves = [[0, 1, 2, 4], [3, 5, 6, 7]]
    async with serving_ranks(settings) as server, asyncio.timeout(60):
        with caplog.at_level(logging.INFO, "expertd.service.ranks.front.balancer"):
            await change(server, action="pin", model="tiny", ranks=halves)
        messages = [each.getMessage() for each in caplog.records if each.name.endswith("balancer")]
        assert messages == ["model tiny: pinned the placement, moved 2 experts"]
        expected = await output_for(server, rows(3))
        assert server.app.engine.loaded is not None
        changes = server.app.engine.loaded.placements
        assert isinstance(changes, Balancer)
        wrong = MoveCommand(9, 0, Kind.PREPARE, [Fetch(0, 1, 1)], start=7)  # there is no matrix 7
        with pytest.raises(DeviceLostError, match="rank 0: moving experts failed: "):
            await asyncio.to_thread(changes._supervisor.group().move, 9, wrong.packed())
        await until(lambda: server.app.engine.why_not_ready() is not None)
        for body in ({"action": "rebalance"}, {"action": "pin", "model": "tiny", "ranks": halves[::-1]}):
            refused = await server.http.post("/v1/placement", json=body)
            assert "rank 0: moving experts failed: " in error_of(refused, 503)
            assert refused.headers["retry-after"] == "1"
        assert server.metric("placement_failures_total") == 0, "none had begun"
        layer = (await placement(server))["models"]["tiny"]
        assert (held(layer), layer["pinned"]) == (halves, True)
        assert layer["moves"] == server.metric("placement_moves_total", model="tiny") == 2
        await until(lambda: server.app.engine.why_not_ready() is None, 30)
        assert close(await output_for(server, rows(3)), expected)


async def check_tokens_of_ranks(server: Serving, ids: NDArray[np.int32], layer: Any) -> None:
    """The ranks compute what they should by the placement that the server shows."""

    def counts() -> list[float]:
        return [server.metric("rank_expert_tokens_total", rank=rank) for rank in "01"]

    experts = [expert for rank in layer["ranks"] for expert in rank["experts"]]
    placed = Placement(np.array(experts), EXPERTS, 2)
    chosen = chosen_replicas(placed, ids, np.arange(len(ids)))
    expected = np.bincount(placed.rank_of_slot()[chosen].ravel(), minlength=2)
    before = counts()
    output_of(await server.infer(*routed(ids)))
    assert (np.array(counts()) - before).tolist() == expected.tolist()
