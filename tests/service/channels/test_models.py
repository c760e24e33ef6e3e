"""Channels with several models, and requests that are cancelled."""

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from expertd.service.engine.errors import EngineError
from expertd_client.channel.layout import REASON_CODES
from tests.service.apps import HIDDEN, MODEL, error_of, hidden_request, output_of, rows
from tests.service.channels.servers import answer_of, answer_to, channel, channel_server, claimed
from tests.service.runners import EchoRunner
from tests.service.waiting import until

WIDE = {**MODEL, "name": "wide", "hidden_size": 2 * HIDDEN, "top_k": 1}


async def test_requests_name_their_model(tmp_path: Path) -> None:
    async with channel(
        tmp_path, models=[MODEL, WIDE], request={"model": None, "models": ["wide", "tiny"]}
    ) as (server, peer):
        assert (peer.hidden_size, peer.top_k) == (2 * HIDDEN, 2), "the largest of both"
        narrow, wide = rows(3), rows(6).reshape(3, 2 * HIDDEN)
        expected = output_of(await server.infer(*hidden_request(narrow)))
        places = peer.places(1)
        peer.array(places[0], narrow.shape, np.float32)[:] = narrow
        assert (await answer_to(peer, peer.send(3, places, model=1))).status == 200
        assert np.array_equal(peer.array(places[3], narrow.shape, np.float32), expected)
        places = peer.places(2)
        peer.array(places[0], wide.shape, np.float32)[:] = wide
        assert (await answer_to(peer, peer.send(3, places))).status == 200
        assert np.abs(peer.array(places[3], wide.shape, np.float32)).sum() > 0
        answer = await answer_of(peer, model=2)
        assert (answer.status, answer.error) == (400, "model: expected a number below 2, got 2")
        await until(lambda: server.metric("requests_total", model="", status="400") == 1)
        await until(lambda: server.metric("requests_total", model="wide", status="200") == 1)
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 2)
        listed = (await server.http.get("/v1/channels")).json()["channels"][0]
        assert listed["models"] == ["wide", "tiny"]
        assert "model" not in listed


async def test_a_channel_outlives_its_model_and_serves_it_when_it_is_loaded_again(tmp_path: Path) -> None:
    other = {**MODEL, "name": "other"}
    async with channel_server(tmp_path, models=[MODEL, other]) as server:
        peer = await claimed(server, model="other")
        values = rows(3)

        async def output() -> Any:
            places = peer.places(peer.sequence + 1)
            peer.array(places[0], values.shape, np.float32)[:] = values
            answer = await answer_to(peer, peer.send(3, places))
            return answer if answer.status != 200 else peer.array(places[3], values.shape, np.float32).copy()

        for _ in range(6):  # more than there are slots
            before = await output()
        loaded = server.app.engine.loaded
        assert loaded is not None
        runner: Any = loaded.runners["other"]
        weights = weakref.ref(runner.layer.weights.gate_up.data)
        del runner
        unloaded = await server.http.post("/v2/repository/models/other/unload")
        assert unloaded.status_code == 200
        gc.collect()
        assert weights() is None, "the channel keeps nothing of it"
        answer = await output()
        assert (answer.status, answer.error) == (404, "model other: expected a loaded one, got it unloaded")
        body = {"version": 3, "model": "other", "num_slots": 1, "max_tokens": 1}
        assert error_of(await server.http.post("/v1/channels", json=body), 404) == answer.error
        await server.http.post("/v2/repository/models/other/load")
        for _ in range(6):
            assert np.array_equal(await output(), before)
        peer.close()


async def test_a_cancelled_request_leaves_the_queue(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner) as server:
        first, second = await claimed(server), await claimed(server)
        runner.gate.clear()
        begun = first.send(1, first.places(1))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        cancelled, kept = (second.send(1, second.places(number)) for number in (1, 2))
        first.cancel(begun)
        second.cancel(cancelled)
        server.app.engine.executor.poll_sources()
        answer = await answer_to(second, cancelled)
        assert (answer.status, answer.error) == (499, "the caller has cancelled the request")
        runner.gate.set()
        assert (await answer_to(first, begun)).status == 200, "its step had begun"
        assert (await answer_to(second, kept)).status == 200
        second.cancel(kept)
        assert (await answer_of(second)).status == 200, "an answered request cannot be cancelled"
        await until(lambda: server.metric("requests_total", model="tiny", status="499") == 1)
        first.close()
        second.close()


async def test_a_drain_accepts_what_was_written_during_a_step(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel(tmp_path, runner) as (server, peer):
        runner.gate.clear()
        peer.send(1, peer.places(1))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        peer.send(1, peer.places(2))
        draining = asyncio.ensure_future(server.app.engine.drain())
        await until(lambda: server.app.engine.executor.waiting("tiny")[0] == 1)
        late = peer.send(1, peer.places(3))
        runner.gate.set()
        assert (await answer_to(peer, 2)).status == 200
        assert (await answer_to(peer, late)).status == 503
        assert await draining


def test_every_reason_of_the_engine_has_a_code() -> None:
    beside = {"internal_error", "memory_full"}  # which no request of a channel can have
    errors = EngineError.__subclasses__()
    reasons = {
        error.reason for error in (*errors, *(other for each in errors for other in each.__subclasses__()))
    }
    assert reasons - beside <= set(REASON_CODES)
