"""Statistics in Triton's form: they add up, failures included."""

import asyncio
import time
from typing import Any

import numpy as np

from tests.service.apps import (
    MODEL,
    Serving,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.waiting import until

STAGES = ("compute_input", "compute_infer", "compute_output")


async def statistics(server: Serving, path: str = "/v2/models/tiny/stats") -> dict[str, Any]:
    """The only entry at `path`."""
    response = await server.http.get(path)
    assert response.status_code == 200, response.text
    (entry,) = response.json()["model_stats"]
    return dict(entry)


async def counted(server: Serving, steps: int) -> None:
    """Wait until `steps` steps are counted, which is after their answers are sent."""
    await until(lambda: server.metric("batch_requests_count", model="tiny") >= steps)


async def test_requests_and_failures_add_up() -> None:
    runner = EchoRunner(poison=666.0)
    before = time.time_ns() // 1_000_000
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        for num_tokens in (1, 3, 4, 5):
            output_of(await server.infer(*hidden_request(rows(num_tokens))))
        output_of(await server.infer(*hidden_request(rows(0))))
        error_of(await server.infer(b"{"), 400)
        error_of(await server.infer(*hidden_request(np.full((1, 128), 666.0, np.float32))), 500)
        await server.http.post("/v2/models/nobody/infer")
        await counted(server, 4)
        now = await statistics(server)
    assert (now["inference_count"], now["execution_count"]) == (13, 4)
    assert before <= now["last_inference"] <= time.time_ns() // 1_000_000
    stats = now["inference_stats"]
    assert {name: stats[name]["count"] for name in stats} == {
        "success": 5,
        "fail": 2,
        **dict.fromkeys(("queue", *STAGES), 4),
        "cache_hit": 0,
        "cache_miss": 0,
    }
    assert stats["compute_infer"]["ns"] == 4_000_000
    assert stats["compute_input"]["ns"] == stats["compute_output"]["ns"] == 0
    assert stats["success"]["ns"] > stats["queue"]["ns"] > 0
    assert stats["fail"]["ns"] > 0
    seconds = server.metric("request_seconds_sum", model="tiny")
    assert abs(stats["success"]["ns"] - seconds * 1e9) < 1000
    assert [(each["batch_size"], each["compute_infer"]) for each in now["batch_stats"]] == [
        (1, {"count": 1, "ns": 1_000_000}),
        (4, {"count": 2, "ns": 2_000_000}),
        (8, {"count": 1, "ns": 1_000_000}),
    ]
    assert [each["compute_input"]["count"] for each in now["batch_stats"]] == [1, 2, 1]


async def test_each_request_of_a_step_counts_its_time() -> None:
    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        await runner.begun()
        others = [asyncio.ensure_future(server.infer(*hidden_request(rows(2)))) for _ in range(3)]
        await until(lambda: server.metric("queue_tokens", model="tiny") == 6)
        runner.gate.set()
        await asyncio.gather(first, *others)
        await counted(server, 2)
        now = await statistics(server)
    assert (now["inference_count"], now["execution_count"]) == (7, 2)
    assert now["inference_stats"]["compute_infer"] == {"count": 4, "ns": 4_000_000}
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in now["batch_stats"]] == [
        (1, 1),
        (8, 1),
    ]


async def test_every_model_is_listed_and_an_unknown_one_is_not() -> None:
    models = [MODEL, {**MODEL, "name": "other"}, {**MODEL, "name": "stats"}]
    async with serving(tiny_settings(models=models), serving_runner(EchoRunner())) as server:
        output_of(await server.infer(*hidden_request(rows(3))))
        await counted(server, 1)
        everything = (await server.http.get("/v2/models/stats")).json()["model_stats"]
        assert [(each["name"], each["execution_count"]) for each in everything] == [
            ("tiny", 1),
            ("other", 0),
            ("stats", 0),
        ]
        assert await statistics(server, "/v2/models/tiny/versions/1/stats") == everything[0]
        assert (await statistics(server, "/v2/models/stats/stats"))["name"] == "stats"
        assert (await server.http.get("/v2/models/stats/versions/1")).json()["name"] == "stats"
        for path in ("nobody/stats", "tiny/versions/2/stats", "nobody/config", "tiny/versions/2/config"):
            error_of(await server.http.get(f"/v2/models/{path}"), 404)
