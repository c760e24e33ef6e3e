"""Lanes, served: the same answers as without, over HTTP and channels, while the other lane is busy."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.loading import LoadedLayers, Loader, load
from expertd.service.settings.model import Settings
from tests.service.apps import (
    Serving,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.channels.servers import answer_of, answer_to, claimed
from tests.service.http.routes.test_partitions import Device
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, connect, head, read_answer
from tests.service.waiting import until

LANES = {"decode_max_tokens": 4}
SPLIT = {"decode_partition": "decode", "prefill_partition": "prefill"}


def two_runners(decode: EchoRunner, prefill: EchoRunner, device: Device | None = None) -> Loader:
    """A loader that serves every model with these, one for each lane."""
    loader = serving_runner(decode, device)

    def load_two(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
        loaded = loader(settings, cancelled)
        return replace(loaded, prefill_runners=dict.fromkeys(loaded.runners, prefill))

    return load_two


@asynccontextmanager
async def two_lanes(
    directory: Path | None = None, device: Device | None = None, **changes: Any
) -> AsyncIterator[tuple[Serving, EchoRunner, EchoRunner]]:
    """A server with a runner for each lane, and with channels if there is a directory."""
    if directory is not None:
        changes["channels"] = {"socket": str(directory / "channels")}
    runners = EchoRunner(), EchoRunner()
    settings = tiny_settings(**{"lanes": LANES, **changes})
    async with serving(settings, two_runners(*runners, device)) as server:
        try:
            yield server, *runners
        finally:
            for runner in runners:
                runner.gate.set()


async def ask(server: Serving, num_tokens: int) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(server.infer(*hidden_request(rows(num_tokens))))


async def test_answers_have_the_bits_of_a_server_without_lanes() -> None:
    async def answers(**changes: Any) -> list[Any]:
        async with serving(tiny_settings(**changes), load) as server:
            return [output_of(await server.infer(*hidden_request(rows(n, n)))) for n in (1, 4, 5, 64)]

    for lanes, plain in zip(await answers(lanes=LANES), await answers(), strict=True):
        assert np.array_equal(lanes, plain)


async def test_both_lanes_compute_real_layers_at_once() -> None:
    async with serving(tiny_settings(lanes=LANES), load) as server:
        alone = {n: output_of(await server.infer(*hidden_request(rows(n, n)))) for n in (1, 3, 40, 64)}
        for _ in range(5):
            tasks = {n: asyncio.ensure_future(server.infer(*hidden_request(rows(n, n)))) for n in alone}
            for count, task in tasks.items():
                np.testing.assert_allclose(output_of(await task), alone[count], rtol=1e-2, atol=1e-3)
        assert server.metric("lane_tokens_total", model="tiny", lane="decode") > 0
        assert server.metric("lane_tokens_total", model="tiny", lane="prefill") > 0


async def test_a_short_request_over_http_does_not_wait_for_a_long_one() -> None:
    async with two_lanes() as (server, decode, prefill):
        prefill.gate.clear()
        long = await ask(server, 64)
        await prefill.begun()
        waiting = await ask(server, 5)
        await until(lambda: server.metric("lane_queue_requests", model="tiny", lane="prefill") == 1)
        assert server.metric("lane_queue_tokens", model="tiny", lane="prefill") == 5
        assert server.metric("lane_queue_tokens", model="tiny", lane="decode") == 0
        assert server.metric("queue_requests", model="tiny") == 1
        for count in (1, 4, 2):
            output_of(await server.infer(*hidden_request(rows(count))))
        assert not long.done()
        prefill.gate.set()
        output_of(await long)
        output_of(await waiting)
    assert (decode.steps, prefill.steps) == ([[1], [4], [2]], [[64], [5]])


async def test_a_long_request_is_refused_before_its_body_if_only_its_queue_is_full() -> None:
    async with two_lanes(limits={"max_queue_tokens": 64}) as (server, _, prefill):
        prefill.gate.clear()
        tasks = [await ask(server, 64)]
        await prefill.begun()
        tasks.append(await ask(server, 64))
        await until(lambda: server.metric("lane_queue_tokens", model="tiny", lane="prefill") == 64)
        body, length = hidden_request(rows(64))
        sizes = (f"Content-Length: {len(body)}", f"Inference-Header-Content-Length: {length}")
        with closing(connect(server.port)) as sock:
            sock.sendall(head(f"POST {INFER} HTTP/1.1", *sizes, "Expect: 100-continue"))
            answer = await asyncio.to_thread(read_answer, sock)
            assert (answer.status, "the queue of model tiny is full" in answer.error) == (503, True)
            assert int(answer.headers["retry-after"]) >= 1
        output_of(await server.infer(*hidden_request(rows(4))))
        prefill.gate.set()
        for task in tasks:
            output_of(await task)


async def test_a_channel_is_read_while_the_short_lane_is_in_a_step(tmp_path: Path) -> None:
    async with two_lanes(tmp_path) as (server, decode, prefill):
        peer = await claimed(server)
        tasks = []
        for runner, count in ((decode, 1), (prefill, 64)):
            runner.gate.clear()
            tasks.append(await ask(server, count))
            await runner.begun()
        sequence = peer.send(16, peer.places(1))
        prefill.gate.set()
        assert (await answer_to(peer, sequence)).status == 200
        assert not tasks[0].done()
        decode.gate.set()
        for task in tasks:
            output_of(await task)
        peer.close()


async def test_deadlines_on_the_long_lane(tmp_path: Path) -> None:
    async with two_lanes(tmp_path) as (server, _, prefill):
        peer = await claimed(server)
        prefill.gate.clear()
        first = peer.send(16, peer.places(1))
        await prefill.begun()
        late = await server.infer(*hidden_request(rows(8), parameters={"timeout": 1000}))
        assert "timeout of 1000 microseconds expired" in error_of(late, 503)
        assert (await answer_of(peer, 8, timeout=0.001)).status == 503
        prefill.gate.set()
        assert (await answer_to(peer, first)).status == 200
        peer.close()
    assert prefill.steps == [[16]]


async def test_a_split_changes_under_traffic_and_drops_no_request() -> None:
    device = Device()
    lanes, split = {**LANES, **SPLIT}, {"decode": 32, "prefill": 100}
    async with two_lanes(device=device, lanes=lanes, partitions=split) as (server, decode, prefill):
        for runner, count in ((decode, 1), (prefill, 64)):
            runner.gate.clear()
            runner.first = await ask(server, count)  # type: ignore[attr-defined]
            await runner.begun()
        change = asyncio.ensure_future(
            server.http.put("/v1/partitions", json={"partitions": {"decode": 64, "prefill": 64}})
        )
        await asyncio.sleep(0)
        waiting = [await ask(server, count) for count in (1, 2, 5, 64)]
        await until(lambda: server.metric("queue_requests", model="tiny") == 4)
        decode.gate.set()
        output_of(await decode.first)  # type: ignore[attr-defined]
        assert list(device.partitions) == [], "a step still runs"
        prefill.gate.set()
        assert (await change).status_code == 200
        assert [share.num_sms for share in device.partitions] == [64, 64]
        for task in (prefill.first, *waiting):  # type: ignore[attr-defined]
            output_of(await task)
        refused = await server.http.put("/v1/partitions", json={"partitions": {"decode": 64}})
        expected = "partitions: expected 'prefill', in which a lane runs, among them, got decode"
        assert error_of(refused, 422) == expected


@pytest.mark.parametrize("stuck", ["decode", "prefill"])
async def test_a_step_that_hangs_is_noticed_on_each_lane(stuck: str) -> None:
    async with two_lanes(step_timeout_seconds=0.5) as (server, decode, prefill), asyncio.timeout(60):
        runner, count = (decode, 1) if stuck == "decode" else (prefill, 64)
        runner.gate.clear()
        text = "the device hangs: expected the end of a step within 0.5 s, got none"
        assert error_of(await server.infer(*hidden_request(rows(count))), 503) == text
        assert error_of(await server.http.get("/v2/health/ready"), 503) == text
        runner.gate.set()
        await until(lambda: not server.app.engine.executor.lanes[stuck == "prefill"].step_in_flight()[0])


async def test_a_lane_that_fails_is_tried_again() -> None:
    """Although nobody sends it requests while the server is not ready."""
    async with two_lanes() as (server, _, prefill):
        prefill.poison = 0.0
        for _ in range(5):
            assert (await server.infer(*hidden_request(np.zeros((5, 128), np.float32)))).status_code == 500
        output_of(await server.infer(*hidden_request(rows(1))))
        ready = "/v2/models/tiny/ready"
        assert "at least the last 5 steps failed" in error_of(await server.http.get(ready), 503)
        prefill.poison = None
        async with asyncio.timeout(60):
            while (await server.http.get(ready)).status_code != 200:
                await asyncio.sleep(0.01)


async def test_a_drain_answers_both_lanes() -> None:
    async with two_lanes() as (server, decode, prefill):
        tasks = []
        for runner, count in ((decode, 1), (prefill, 64)):
            runner.gate.clear()
            tasks += [await ask(server, count)]
            await runner.begun()
            tasks += [await ask(server, count)]
        await until(lambda: server.metric("queue_requests", model="tiny") == 2)
        drain = asyncio.ensure_future(server.app.engine.drain())
        await until(lambda: server.app.engine.draining)
        decode.gate.set()
        await asyncio.wait({tasks[1]})
        assert not drain.done()
        prefill.gate.set()
        assert await drain
        for task in tasks:
            output_of(await task)


async def test_each_thread_is_prepared_before_its_first_step() -> None:
    prepared: list[str] = []
    loader = two_runners(EchoRunner(), EchoRunner())

    def load_two(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
        thread = lambda: prepared.append(threading.current_thread().name)  # noqa: E731
        return replace(loader(settings, cancelled), prepare_thread=thread)

    async with serving(tiny_settings(lanes=LANES), load_two) as server:
        for count in (1, 64):
            output_of(await server.infer(*hidden_request(rows(count))))
    assert prepared == ["expertd-worker", "expertd-worker-1", threading.current_thread().name]
