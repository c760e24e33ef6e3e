"""Long requests in chunks, served: the same answers over HTTP and channels, and callers by their keys."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.loading import LoadedLayers, load
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.model import Settings
from tests.service.apps import (
    HIDDEN,
    MODEL,
    Serving,
    hidden_request,
    json_request,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.channels.servers import answer_of, answer_to, claimed
from tests.service.competing import CHUNKS, HeldRunner, competing, holding, in_chunks, polled, waiting
from tests.service.keys import bearer, write_keys
from tests.service.ranks.servers import close, output_for
from tests.service.ranks.steps import routing
from tests.service.regions import region, region_input, region_output
from tests.service.runners import Computed, EchoRunner
from tests.service.sockets import connect, infer
from tests.service.waiting import until
from tests.short import few_of

LONG = rows(64, 5)


@asynccontextmanager
async def chunking(
    directory: Path | None = None, **changes: Any
) -> AsyncIterator[tuple[Serving, HeldRunner]]:
    """A server of the layer "tiny" with chunks of 16 tokens, and with channels if there is a directory."""
    if directory is not None:
        changes["channels"] = {"socket": str(directory / "channels")}
    loader, held = holding(load)
    async with serving(tiny_settings(CHUNKS, **changes), loader) as server:
        yield server, held[0]


async def test_outputs_are_those_of_whole_requests() -> None:
    async with chunking() as (server, runner):
        whole = await output_for(server, LONG)
        assert runner.steps == [[64]], "nobody competes"
        assert server.metric("chunks_total", model="tiny") == 0
        assert close(await in_chunks(server, runner, lambda: output_for(server, LONG)), whole)
        assert server.metric("chunks_total", model="tiny") == 4


@pytest.mark.parametrize("given", [False, True])
async def test_outputs_through_a_channel(tmp_path: Path, given: bool) -> None:
    arguments = routing(64) if given else ()
    async with chunking(tmp_path) as (server, runner):
        peer = await claimed(server, max_tokens=64)

        async def output() -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
            return await asyncio.to_thread(peer.infer, LONG, *arguments)

        whole = await output()
        assert runner.steps == [[64]]
        async with polled(server):
            assert close(await in_chunks(server, runner, output), whole)
        peer.close()


async def test_outputs_in_shared_memory() -> None:
    async with chunking(shared_memory={"enabled": True}) as (server, runner):
        whole = await output_for(server, LONG)
        async with region(server, 2 * LONG.nbytes) as file:
            file.write(LONG, 0)
            outputs = region_output("r", LONG.nbytes, LONG.nbytes)
            body = json_request(region_input("r", [64, HIDDEN]), outputs=outputs)
            response = await in_chunks(server, runner, lambda: server.infer(body))
            assert response.status_code == 200, response.text
            got = np.frombuffer(file.read(LONG.nbytes, LONG.nbytes), np.float32).reshape(LONG.shape)
        assert close(got, whole)


async def test_a_client_that_leaves_between_chunks_ends_its_request() -> None:
    async with chunking() as (server, runner):
        async with competing(server, runner):
            sock = connect(server.port)
            sock.sendall(infer(*hidden_request(LONG)))
            await until(lambda: waiting(server) == 2)
            sock.close()
            await until(lambda: waiting(server) == 1)
        assert runner.steps == [[1], [1]]


@pytest.mark.parametrize("over_http", few_of([True, False], [True]))
async def test_a_timeout_between_chunks_ends_a_request(tmp_path: Path, over_http: bool) -> None:
    async with chunking(tmp_path) as (server, runner):
        peer = await claimed(server, max_tokens=64)
        async with competing(server, runner):
            if over_http:
                body = hidden_request(LONG, parameters={"timeout": 4_000_000})
                response = asyncio.ensure_future(server.infer(*body))
            else:
                sequence = peer.send(64, peer.places(1), timeout=4.0)
                server.app.engine.executor.poll_sources()
            await until(lambda: waiting(server) == 2)
            runner.let(3)
            await until(lambda: runner.steps == [[1], [1], [16], [16]])
            assert waiting(server) == 1
            await until(lambda: waiting(server) == 0)
            if over_http:
                assert (await response).status_code == 503, "the chunk still runs"
            else:
                assert not await asyncio.to_thread(peer.is_in_time, sequence)
                assert not peer.answered(sequence), "the chunk still uses the slot"
        if not over_http:
            assert (await answer_to(peer, sequence)).status == 503
        peer.close()
    assert runner.steps == [[1], [1], [16], [16]]


async def test_what_waits_in_a_channel_during_a_step_competes(tmp_path: Path) -> None:
    """The worker thread finds it after the step."""
    async with chunking(tmp_path) as (server, runner):
        peers = [await claimed(server, max_tokens=64) for _ in range(2)]
        runner.close()
        sent = [peers[0].send(64, peers[0].places(1))]
        await until(lambda: runner.steps == [[64]])
        sent.append(peers[1].send(1, peers[1].places(1)))
        runner.open()
        for peer, sequence in zip(peers, sent, strict=True):
            assert (await answer_to(peer, sequence)).status == 200
        assert (await answer_of(peers[0], 64)).status == 200
        for peer in peers:
            peer.close()
    assert runner.steps == [[64], [1], [16], [16], [16], [16]]


async def test_a_channels_request_can_be_cancelled_between_chunks(tmp_path: Path) -> None:
    async with chunking(tmp_path) as (server, runner):
        peer = await claimed(server, max_tokens=64)
        async with competing(server, runner):
            sequence = peer.send(64, peer.places(1))
            server.app.engine.executor.poll_sources()
            await until(lambda: waiting(server) == 2)
            runner.let(2)
            await until(lambda: runner.steps == [[1], [1], [16]])
            peer.cancel(sequence)
            server.app.engine.executor.poll_sources()
            assert waiting(server) == 0
            assert not peer.answered(sequence), "the step still writes its output"
        assert (await answer_to(peer, sequence)).status == 499
        peer.close()
    assert runner.steps == [[1], [1], [16]]


async def test_keys_share_a_full_server(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", heavy=["infer"], light=["infer"])
    loader, held = holding(load)
    limits = {"max_batch_tokens": 64}
    order: list[str] = []
    async with serving(tiny_settings(limits, keys=str(keys)), loader) as server:

        async def send(name: str, num_tokens: int) -> None:
            body, length = hidden_request(rows(num_tokens))
            response = await server.infer(body, length, **bearer(name))
            assert response.status_code == 200
            order.append(name)

        held[0].close()
        calls = [asyncio.ensure_future(send("heavy", 1))]
        await until(lambda: held[0].steps == [[1]])
        for _ in range(4):
            calls.append(asyncio.ensure_future(send("heavy", 64)))
            await until(lambda: waiting(server) == len(calls) - 1)
        calls.append(asyncio.ensure_future(send("light", 64)))
        await until(lambda: waiting(server) == 5)
        held[0].open()
        await asyncio.gather(*calls)
    assert order == ["heavy", "heavy", "light", "heavy", "heavy", "heavy"]


async def test_channels_belong_to_the_keys_that_opened_them(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", heavy=["infer"], light=["infer"])
    loader, held = holding(load)
    settings = tiny_settings(
        {"max_batch_tokens": 64}, keys=str(keys), channels={"socket": str(tmp_path / "channels")}
    )
    async with serving(settings, loader) as server:
        peers = {}
        for name in ("heavy", "light"):
            server.http.headers.update(bearer(name))
            peers[name] = await claimed(server, max_tokens=64)
        held[0].close()
        sent = []
        for name, num_tokens in (("heavy", 1), ("heavy", 64), ("heavy", 63), ("light", 62)):
            peer = peers[name]
            sent.append((peer, peer.send(num_tokens, peer.places(peer.sequence + 1))))
            await until(lambda: bool(held[0].steps))
        server.app.engine.executor.poll_sources()
        held[0].open()
        for peer, sequence in sent:
            assert (await answer_to(peer, sequence)).status == 200
        for peer in peers.values():
            peer.close()
    assert held[0].steps == [[1], [64], [62], [63]]


async def test_models_share_the_device_by_their_weights() -> None:
    """Steps of one size, of which each model always has some in its queue."""
    order: list[str] = []

    class Noting(EchoRunner):
        def __init__(self, model: str) -> None:
            super().__init__()
            self._model = model

        def begin(self, requests: Sequence[LayerRequest]) -> Computed:
            order.append(self._model)
            return super().begin(requests)

    runners = {model: Noting(model) for model in ("tiny", "other")}
    models = [{**MODEL, "name": "tiny", "weight": 3}, {**MODEL, "name": "other"}]

    def loader(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
        return replace(serving_runner(runners["tiny"])(settings, cancelled), runners=dict(runners))

    async with serving(tiny_settings({"max_batch_tokens": 64}, models=models), loader) as server:

        async def send(model: str) -> None:
            body, length = hidden_request(LONG)
            headers = {"Inference-Header-Content-Length": str(length)}
            answer = await server.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
            assert answer.status_code == 200

        for model in ("tiny", "other"):
            await send(model)  # what a step takes is known from now on
        runners["other"].gate.clear()
        calls = [asyncio.ensure_future(send("other"))]
        await until(lambda: len(order) == 3)
        for model in ("tiny", "other"):
            calls += [asyncio.ensure_future(send(model)) for _ in range(6)]
            await until(lambda model=model: server.metric("queue_requests", model=model) == 6)  # type: ignore[misc]
        runners["other"].gate.set()
        await asyncio.gather(*calls)
    assert order[:2] == ["tiny", "other"]
    assert order[3:11].count("tiny") == 6
