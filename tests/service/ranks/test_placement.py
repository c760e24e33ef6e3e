"""The calls and policies of placements: balanced by measured loads, pinned by callers, refused if wrong."""

import asyncio

import numpy as np
import pytest

from expertd.service.moe.placement import contiguous_placement, global_placement
from expertd.service.ranks.front.balancer import pinned
from tests.service.apps import error_of, output_of, rows, serving, tiny_settings
from tests.service.ranks.placing import (
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
from tests.service.ranks.servers import close, output_for, serving_ranks
from tests.service.waiting import until

pytestmark = pytest.mark.slow  # each server starts processes


async def test_skewed_routing_is_balanced() -> None:
    settings = tiny_settings(LIMITS, ranks=2, models=[MANY], placement=STATIC)
    async with serving_ranks(settings) as server, asyncio.timeout(60):
        for seed in range(8):
            output_of(await server.infer(*routed(skewed(512, seed), seed)))
        before = (await placement(server))["models"]["tiny"]
        assert before["max_over_mean"] > 1.3
        after = await change(server, action="rebalance")
        assert after["max_over_mean"] <= 1.05
        assert after["last_plan"]["before"] == pytest.approx(before["max_over_mean"])
        assert after["last_plan"]["after"] == pytest.approx(after["max_over_mean"])  # summed in another order
        assert after["moves"] >= after["last_plan"]["moves"] > 0


@pytest.mark.parametrize("objective", ["tokens", "activated"])
async def test_answers_with_replicas_are_those_of_one_process(objective: str) -> None:
    more = {"placement": {"policy": "static", "replicas": 3, "objective": objective}, "exact_combine": False}
    settings = tiny_settings(ONE_EACH, ranks=2, models=[SMALL], **more)
    async with serving(tiny_settings(ONE_EACH, models=[SMALL])) as one, serving_ranks(settings) as server:
        body = routed(uniform(200, 1))
        expected = output_of(await one.infer(*body))
        assert close(output_of(await server.infer(*body)), expected)
        layer = await change(server, action="pin", model="tiny", ranks=[[7, 6, 5, 0, 0, 1], [4, 3, 2, 1, 0]])
        assert held(layer) == [[0, 0, 1, 5, 6, 7], [0, 1, 2, 3, 4]]
        for _ in range(3):  # with the objective "activated", each step may use other replicas
            assert close(output_of(await server.infer(*body)), expected)
        assert close(await output_for(server, rows(5)), await output_for(one, rows(5)))


async def test_balancing_happens_by_itself_but_not_of_pinned_placements() -> None:
    automatic = {"policy": "balanced", "interval_seconds": 0.2}
    settings = tiny_settings(LIMITS, ranks=2, models=[MANY], placement=automatic)
    async with serving_ranks(settings) as server, asyncio.timeout(60):
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
    async with serving_ranks(settings) as server, asyncio.timeout(60):
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
    async with serving_ranks(settings) as server, asyncio.timeout(60):
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
