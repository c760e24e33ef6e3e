"""Placements: balanced by loads, pinned by callers, refused if wrong; changed under traffic and losses."""

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

from expertd.backends import BACKENDS
from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.memory_needs import expert_slots
from expertd.service.moe.placement import Placement, contiguous_placement, global_placement
from expertd.service.moe.placement.rounds import Fetch
from expertd.service.ranks.front import balancer
from expertd.service.ranks.front.balancer import Balancer, pinned
from expertd.service.ranks.messages import MoveCommand, MoveKind
from tests.service.apps import Serving, error_of, output_of, rows, serving, tiny_settings
from tests.service.moe.placement.greedy import chosen_replicas
from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.placing import (
    EXPERTS,
    LIMITS,
    MANY,
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


async def test_skewed_routing_is_balanced() -> None:
    settings = tiny_settings(LIMITS, ranks=2, models=[MANY], placement=STATIC)
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        for seed in range(8):
            output_of(await server.infer(*routed(skewed(512, seed), seed)))
        before = (await placement(server))["models"]["tiny"]
        assert before["max_over_mean"] > 1.3
        after = await change(server, action="rebalance")
        assert after["max_over_mean"] <= 1.05
        assert after["last_plan"]["before"] == pytest.approx(before["max_over_mean"])
        assert after["last_plan"]["after"] == pytest.approx(after["max_over_mean"])  # summed in another order
        assert after["moves"] >= after["last_plan"]["moves"] > 0


@pytest.mark.parametrize(("objective", "backend"), [("tokens", "cpu"), ("activated", "reference")])
async def test_answers_with_replicas_are_those_of_one_process(objective: str, backend: str) -> None:
    more = {"placement": {"policy": "static", "replicas": 3, "objective": objective}, "exact_combine": False}
    alone = tiny_settings(ONE_EACH, models=[SMALL], backend=backend)
    settings = tiny_settings(ONE_EACH, ranks=2, models=[SMALL], backend=backend, **more)
    async with serving(alone) as one, serving_ranks(settings) as server:
        body = routed(uniform(200, 1))
        expected = output_of(await one.infer(*body))
        assert close(output_of(await server.infer(*body)), expected)
        layer = await change(server, action="pin", model="tiny", ranks=[[7, 6, 5, 0, 0, 1], [4, 3, 2, 1, 0]])
        assert held(layer) == [[0, 0, 1, 5, 6, 7], [0, 1, 2, 3, 4]]
        for _ in range(3):  # with the objective "activated", each step may use other replicas
            assert close(output_of(await server.infer(*body)), expected)
        assert close(await output_for(server, rows(5)), await output_for(one, rows(5)))


async def test_experts_in_the_hosts_memory_move() -> None:
    """The bits are those of ranks with all of their experts on the device."""
    settings = tiny_settings(ONE_EACH, ranks=2, models=[MANY], placement=STATIC, backend="cpu")
    shape = settings.models[0].shape
    budgeted = settings.model_copy(update={"weights_budget": (12 + 2 * 2) * shape.expert_bytes})
    assert expert_slots(budgeted, BACKENDS["cpu"]) == {"tiny": 12}, "of 36, beside two chunks of 2"
    sent = [routed(skewed(count, count), count) for count in (1, 200, 2, 1)]
    halves = [[*range(32), *range(32, 36)], [*range(32, 64), *range(4)]]
    outputs = list[list[NDArray[np.float32]]]()
    for each in (settings, budgeted):
        async with serving_ranks(each) as server, asyncio.timeout(240):
            got = [output_of(await server.infer(*body)) for body in sent]
            for ranks in (halves[::-1], [[*range(0, 64, 2), 1, 1, 3, 5], [*range(1, 64, 2), 1, 3, 5, 7]]):
                layer = await change(server, action="pin", model="tiny", ranks=ranks)
                assert held(layer) == [sorted(rank) for rank in ranks]
                got += [output_of(await server.infer(*body)) for body in sent]
            outputs.append(got)
            hits, misses = (
                server.metric(f"expert_store_{name}_total", model="tiny") for name in ("hits", "misses")
            )
            assert (min(hits, misses) > 0) == (each is budgeted)
    for whole, stored in zip(*outputs, strict=True):
        np.testing.assert_array_equal(stored, whole)


async def test_balancing_happens_by_itself_but_not_of_pinned_placements() -> None:
    automatic = {"policy": "balanced", "interval_seconds": 0.2}
    settings = tiny_settings(LIMITS, ranks=2, models=[MANY], placement=automatic)
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        halves = [list(range(32)), list(range(32, 64))]
        await change(server, action="pin", model="tiny", ranks=halves)
        output_of(await server.infer(*routed(skewed(1024, 0))))
        await asyncio.sleep(0.6)  # three plans
        layer = (await placement(server))["models"]["tiny"]
        assert (held(layer), layer["moves"], layer["last_plan"]) == (halves, 0, None)
        layer = await change(server, action="rebalance", model="tiny")
        assert not layer["pinned"]
        assert layer["max_over_mean"] <= 1.05
        moves = layer["moves"]
        for seed in range(4):  # now the others are busy
            output_of(await server.infer(*routed(63 - skewed(1024, seed))))
        await until(lambda: server.metric("placement_moves_total", model="tiny") > moves)
        await until(lambda: server.metric("rank_imbalance_ratio", model="tiny") <= 1.05)
        assert server.metric("placement_move_seconds_total", model="tiny") > 0
        assert server.metric("placement_failures_total") == 0
        loads = [server.metric("rank_load", model="tiny", rank=rank) for rank in "01"]
        assert max(loads) / np.mean(loads) <= 1.05


async def test_a_gain_below_5_percent_is_not_carried_out() -> None:
    settings = tiny_settings(LIMITS, ranks=2, models=[SMALL], placement={"policy": "static"})
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        ids = np.tile(np.array([[0, 1, 4, 5], [2, 3, 6, 7]], np.int32), (100, 1))
        ids[:6] = [0, 1, 2, 4]
        output_of(await server.infer(*routed(ids)))
        before = await placement(server)
        assert 1.0 < before["models"]["tiny"]["max_over_mean"] < 1.05
        layer = await change(server, action="rebalance")
        assert layer["last_plan"]["moves"] == layer["moves"] == 0
        assert held(layer) == held(before["models"]["tiny"])


async def test_wrong_requests_change_nothing() -> None:
    settings = tiny_settings(ranks=2, models=[SMALL], placement={"policy": "static", "replicas": 1})
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        before = await placement(server)
        five, four = [0, 1, 2, 3, 4], [4, 5, 6, 7]
        for status, body, error in (
            (400, b"{", "body: "),
            (422, b"[]", "body: "),
            (422, {"action": "move"}, "action: expected"),
            (422, {"action": "rebalance", "ranks": []}, "body: expected no ranks with"),
            (422, {"action": "pin", "model": "tiny"}, "body: expected ranks with"),
            (404, {"action": "rebalance", "model": "huge"}, "model: expected tiny, got 'huge'"),
            (404, {"action": "pin", "model": "huge", "ranks": [five, four]}, "model: expected tiny, got"),
            (
                422,
                {"action": "pin", "model": "tiny", "ranks": [five]},
                "ranks: expected a list for each of 2",
            ),
            (
                422,
                {"action": "pin", "model": "tiny", "ranks": [five, five]},
                "ranks.1: expected 4 experts, for which rank 1 has memory, got 5",
            ),
            (
                422,
                {"action": "pin", "model": "tiny", "ranks": [five, [5, 6, 7, 8]]},
                "ranks.1: expected experts 0 to 7, got 8",
            ),
            (
                422,
                {"action": "pin", "model": "tiny", "ranks": [five, [4, 5, 6, 6]]},
                "ranks: expected each of 8 experts on a rank, got none with expert 7",
            ),
        ):
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            text = error_of(await server.http.post("/v1/placement", **sent), status)
            assert text.startswith(error), (body, text)
        assert await placement(server) == before


def test_what_a_plan_has_made_can_be_pinned() -> None:
    made = global_placement([8.0, 8.0, 2.0], 2, 4)
    ranks = [made.experts_of_rank(rank).tolist() for rank in range(2)]
    assert ranks == [[1, 2], [0, 0]], "as DeepSeek's rules have it: the spare replica is beside the first"
    wanted = pinned(contiguous_placement(3, 2, 4), ranks)
    assert (wanted.physical_to_logical == made.physical_to_logical).all()
    assert wanted.load_by_rank([8.0, 8.0, 2.0]).tolist() == [10.0, 8.0]


async def test_servers_whose_placement_is_fixed_say_so() -> None:
    expected = "placement: expected several ranks, and the setting placement.policy, got "
    async with serving(tiny_settings()) as one, serving_ranks(tiny_settings(ranks=2)) as two:
        for server, got in ((one, "one rank"), (two, "2 ranks and null")):
            assert error_of(await server.http.get("/v1/placement"), 409) == expected + got
            response = await server.http.post("/v1/placement", json={"action": "rebalance"})
            assert error_of(response, 409) == expected + got


@pytest.mark.parametrize("num_nodes", [1, pytest.param(2, marks=pytest.mark.thorough)])
async def test_answers_keep_their_bits_across_changes_under_traffic(num_nodes: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"models": [SMALL], "placement": {"policy": "static"}}
    with ExitStack() as stack:
        if num_nodes == 1:
            settings = tiny_settings(ONE_EACH, ranks=2, **given)
        else:
            settings = node_settings(ONE_EACH, **given)
            stack.enter_context(agent(settings, tmp_path))
        async with serving_ranks(settings) as server, asyncio.timeout(240):
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
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        ids = skewed(256, 0)
        async with traffic_to(server, [routed(ids)], np.array_equal) as traffic:
            moving = asyncio.create_task(server.http.post("/v1/placement", json=pin))
            await until(lambda: server.metric("placement_moves_total", model="tiny") > 4)
            assert (await placement(server))["moving"]
            os.kill(rank_processes()[rank], signal.SIGKILL)
            assert "its process ended by SIGKILL" in error_of(await moving, 503)
            assert (await moving).headers["retry-after"] == "1"
            await until(lambda: server.app.engine.why_not_ready() is None)
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
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        with caplog.at_level(logging.INFO, "expertd.service.ranks.front.balancer"):
            await change(server, action="pin", model="tiny", ranks=halves)
        messages = [each.getMessage() for each in caplog.records if each.name.endswith("balancer")]
        assert messages == ["model tiny: pinned the placement, moved 2 experts"]
        expected = await output_for(server, rows(3))
        assert server.app.engine.loaded is not None
        changes = server.app.engine.loaded.placements
        assert isinstance(changes, Balancer)
        wrong = MoveCommand(9, 0, MoveKind.PREPARE, [Fetch(0, 1, 1)], start=7)  # there is no matrix 7
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
        await until(lambda: server.app.engine.why_not_ready() is None)
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
