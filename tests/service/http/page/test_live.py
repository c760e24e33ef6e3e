"""/v1/live: its events, one snapshot for all viewers, and how streams end."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertd.service.http import feed as feed_module
from expertd.service.http.feed import Feed
from tests.paths import ROOT
from tests.service.apps import (
    MODEL,
    NUM_EXPERTS,
    TOP_K,
    Serving,
    error_of,
    hidden_request,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.http.processes import two_processes
from tests.service.http.routes.test_partitions import Device
from tests.service.processes import server_process
from tests.service.runners import EchoRunner
from tests.service.waiting import until, wait_for


class Snapshots:
    """Numbers of the snapshots made, and the models asked for each time."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    def take(self, models: Collection[str]) -> dict[str, bytes]:
        self.asked.append(set(models))
        return {model: f"{model} {len(self.asked)}".encode() for model in models}


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> Snapshots:
    monkeypatch.setattr(feed_module, "SECONDS", 0.02)
    return Snapshots()


async def test_viewers_share_a_snapshot(snapshots: Snapshots) -> None:
    feed = Feed(snapshots.take, 3)
    viewers = [feed.open(model) for model in ("a", "a", "b")]
    seen = await asyncio.gather(*(_all(viewer.events(2)) for viewer in viewers))
    assert seen == [[b"a 1", b"a 2"], [b"a 1", b"a 2"], [b"b 1", b"b 2"]]
    assert snapshots.asked[0] == {"a", "b"}


async def test_nothing_is_computed_while_nobody_looks(snapshots: Snapshots) -> None:
    feed = Feed(snapshots.take, 1)
    await asyncio.sleep(0.1)
    assert snapshots.asked == []
    for _ in range(2):
        viewer = feed.open("a")
        assert [event async for event in viewer.events(1)]
        feed.leave(viewer)
        made = len(snapshots.asked)
        await asyncio.sleep(0.1)
        assert len(snapshots.asked) <= made + 1, "one may have been under way"


async def test_a_slow_viewer_gets_the_latest(snapshots: Snapshots) -> None:
    feed = Feed(snapshots.take, 1)
    events = feed.open("a").events(None)
    await until(lambda: len(snapshots.asked) >= 4)
    await asyncio.sleep(0.01)
    event = await anext(events)
    assert int(event.split()[1]) >= 3


async def test_a_stream_ends_after_its_time(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_LIFE_SECONDS", 0.1)
    feed = Feed(snapshots.take, 1)
    await asyncio.wait_for(_all(feed.open("a").events(None)), 60)  # it ends


async def test_a_snapshot_that_fails_ends_the_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(models: Collection[str]) -> dict[str, bytes]:
        raise ValueError("no snapshot")

    feed = Feed(fail, 1)
    viewer = feed.open("a")
    assert await asyncio.wait_for(_all(viewer.events(None)), 60) == []
    feed.leave(viewer)
    assert "a snapshot for viewers failed" in caplog.text


async def _all(events: AsyncIterator[bytes]) -> list[bytes]:
    return [event async for event in events]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SECONDS", 0.05)


def parsed(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream."""
    blocks = [block.split("\n") for block in text.split("\n\n")[:-1]]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


async def live(server: Serving, query: str = "?events=1") -> dict[str, Any]:
    """The last event of a stream."""
    answer = await server.http.get(f"/v1/live{query}")
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)[-1][1]


async def test_the_first_event_says_what_does_not_change() -> None:
    peers = ["http://experts-0:8000", "https://proxy/experts-1/"]
    async with serving(tiny_settings(page={"peers": peers})) as server:
        answer = await server.http.get("/v1/live?events=2")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = parsed(answer.text)
    assert [name for name, _ in events] == ["server", "snapshot", "snapshot"]
    first = events[0][1]
    sizes = {key: value for key, value in MODEL.items() if key != "name"}
    assert first["peers"] == peers
    assert first["models"] == {"tiny": {**sizes, "partition": None}}
    assert len(events[1][1]["models"]["tiny"]["requests"]["by_seconds"]) == len(first["bounds_seconds"]) + 1


async def test_counts_are_those_of_the_metrics() -> None:
    async with serving(tiny_settings()) as server:
        for tokens in (3, 5):
            assert (await server.infer(*hidden_request(rows(tokens)))).status_code == 200
        assert (await server.infer(b"{}")).status_code == 400
        assert (await server.http.post("/v2/models/none/infer", content=b"{}")).status_code == 404
        await until(lambda: server.metric("tokens_total", model="tiny", layout="contiguous") == 8)
        now = await live(server)
        assert (now["phase"], now["why_not_ready"], now["backend"]) == ("ready", None, "reference")
        tiny = now["models"]["tiny"]
        assert tiny["why_not_ready"] is None
        assert tiny["queue"] == {"requests": 0, "tokens": 0}
        assert (tiny["requests"]["success"], tiny["requests"]["failure"]) == (2, 1)
        assert sum(tiny["requests"]["by_seconds"]) == 2
        assert tiny["requests"]["refused"] == {"invalid_request": 1}
        assert now["not_served"] == {"unknown_model": 1}
        steps = tiny["steps"]
        assert (steps["steps"], steps["tokens"], steps["requests"], steps["failures"]) == (2, 8, 2, 0)
        assert steps["flops"] == server.metric("gemm_flops_total", model="tiny", layout="contiguous")
        assert steps["bytes"] == server.metric("gemm_bytes_total", model="tiny", layout="contiguous")
        measured = server.metric("compute_seconds_sum", model="tiny", layout="contiguous")
        assert steps["seconds"] == pytest.approx(measured, abs=1e-8)
        assert now["experts"]["model"] == "tiny"
        assert now["experts"]["tokens"] == [
            server.metric("expert_tokens_total", model="tiny", expert=str(expert))
            for expert in range(NUM_EXPERTS)
        ]
        assert sum(now["experts"]["tokens"]) == 8 * TOP_K


async def test_experts_are_those_of_one_model() -> None:
    models = [MODEL, {**MODEL, "name": "a.b", "num_experts": 8}]
    async with serving(tiny_settings(models=models)) as server:
        assert (await live(server))["experts"]["model"] == "tiny"
        assert (await live(server, "?events=1&model=a.b"))["experts"] == {"model": "a.b", "tokens": [0] * 8}
        unknown = await server.http.get("/v1/live?model=c")
        assert error_of(unknown, 404) == "model: expected tiny or a.b, got 'c'"
        for number in ("0", "-1", "x", "1000", ""):
            refused = await server.http.get("/v1/live", params={"events": number})
            assert error_of(refused, 400) == f"events: expected a number from 1 to 999, got {number!r}"


async def test_it_shows_partitions_as_their_own_call_does() -> None:
    async with serving(tiny_settings()) as server:
        assert (await live(server))["partitions"] is None
    async with serving(tiny_settings(), serving_runner(EchoRunner(), Device())) as server:
        await server.http.put("/v1/partitions", json={"partitions": {"a": 20}})
        assert (await live(server))["partitions"] == (await server.http.get("/v1/partitions")).json()


async def test_head_ends() -> None:
    async with serving(tiny_settings()) as server:
        answer = await server.http.head("/v1/live")
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert server.app._feed._viewers == set()


async def test_too_many_viewers_and_viewers_who_leave() -> None:
    settings = tiny_settings(page={"max_viewers": 1})
    async with serving(settings) as server:
        url = f"http://127.0.0.1:{server.port}/v1/live"
        async with httpx.AsyncClient(timeout=60) as client:
            async with client.stream("GET", url) as stream:
                lines = stream.aiter_lines()
                assert await anext(lines) == "event: server"
                refused = await client.get(url)
                text = "viewers: expected at most 1 streams (page.max_viewers), got one more"
                assert error_of(refused, 503) == text
                assert refused.headers["retry-after"] == "5"
            await until(lambda: server.app._feed._viewers == set())
            assert (await client.get(f"{url}?events=1")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("http_workers", [1, 2])
def test_viewers_leave_and_do_not_delay_a_shutdown(tmp_path: Path, http_workers: int) -> None:
    settings = two_processes(http_workers=http_workers, page={"max_viewers": 1})
    with server_process(settings, tmp_path) as server:
        url = f"http://{server.url}/v1/live"
        with httpx.stream("GET", url, timeout=60) as stream:
            chunks = stream.iter_text()  # kept: without it, the stream would be closed
            next(chunks)
            assert httpx.get(f"{url}?events=1", timeout=60, verify=False).status_code == 503
        wait_for(
            lambda: httpx.get(f"{url}?events=1", timeout=60, verify=False).status_code == 200,
            "the viewer is gone",
        )
        assert httpx.get(f"{url}?model=none", timeout=60, verify=False).status_code == 404

        with ExitStack() as stack:

            def opened() -> httpx.Response | None:
                """Once the viewer before, who has had all events, is gone."""
                stream = stack.enter_context(httpx.stream("GET", f"{url}?model=other", timeout=60))
                return stream if stream.status_code == 200 else None

            chunks = wait_for(opened, "the stream is open").iter_text()
            text = ""
            while text.count("event: snapshot") < 2:
                text += next(chunks)
            assert parsed(text)[1][1]["experts"]["model"] == "other"
            server.terminate()
            assert server.process.wait(60) == 0
            "".join(chunks)  # it has its end: nothing is raised


async def test_every_field_is_documented() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text().partition("### Events of the page")[2]
    table = re.findall(r"^\| (`.*?) \|", text.partition("\n### ")[0], re.M)
    named = {name for cell in table for name in re.findall(r"`([\w.]+)`", cell)}
    async with serving(tiny_settings()) as server:
        now = await live(server)
    fields = {name for name in now if name != "models"}
    assert named == fields | {f"models.NAME.{name}" for name in now["models"]["tiny"]}


async def test_a_stream_and_others_on_one_connection_do_not_mix() -> None:
    async with serving(tiny_settings()) as server:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(
            limits=limits, base_url=f"http://127.0.0.1:{server.port}", timeout=60
        ) as client:
            for _ in range(3):
                events = parsed((await client.get("/v1/live?events=2")).text)
                assert len(events) == 3
                assert (await client.get("/v2/health/live")).status_code == 200
        await asyncio.sleep(0)
