"""Requests through channels: the same results, queue, limits, deadlines and metrics as over HTTP."""

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertd.service.engine.forecast import Forecast
from tests.service.apps import (
    HIDDEN,
    TOP_K,
    Serving,
    binary_request,
    error_of,
    hidden_request,
    output_of,
    rows,
)
from tests.service.channels.peer import Peer
from tests.service.channels.servers import answer_of, answer_to, channel, channel_server, claimed
from tests.service.keys import bearer, write_keys
from tests.service.ranks.steps import routing
from tests.service.runners import EchoRunner, Turnstile
from tests.service.waiting import until

DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


async def test_results_are_those_of_http(tmp_path: Path) -> None:
    async with channel(tmp_path) as (server, peer):
        for seed in range(6):  # more than there are slots
            hidden_states = rows(1 + 3 * seed, seed)
            over_http = output_of(await server.infer(*hidden_request(hidden_states)))
            assert np.array_equal(await asyncio.to_thread(peer.infer, hidden_states), over_http)
            ids, weights = routing(len(hidden_states), seed)
            tensors = {
                "hidden_states": ("FP32", list(hidden_states.shape), hidden_states.tobytes()),
                "topk_ids": ("INT32", list(ids.shape), ids.tobytes()),
                "topk_weights": ("FP32", list(weights.shape), weights.tobytes()),
            }
            body, length = binary_request(tensors, parameters={"binary_data_output": True})
            over_http = output_of(await server.infer(body, length))
            assert np.array_equal(await asyncio.to_thread(peer.infer, hidden_states, ids, weights), over_http)


async def test_every_pair_of_datatypes(tmp_path: Path) -> None:
    async with channel(tmp_path) as (server, peer):
        for datatype, output_datatype in product(DTYPES, DTYPES):
            rounded = torch.from_numpy(rows(5)).to(DTYPES[datatype])
            over_http = output_of(await server.infer(*hidden_request(rounded.float().numpy())))
            places = peer.places(peer.sequence + 1)
            data = rounded.view(torch.uint8).numpy().ravel()
            peer.array(places[0], data.shape, np.uint8)[:] = data
            answer = await answer_of(peer, 5, datatype=datatype, output_datatype=output_datatype)
            assert (answer.status, answer.error) == (200, "")
            size = 5 * HIDDEN * DTYPES[output_datatype].itemsize
            output = torch.from_numpy(peer.array(places[3], (size,), np.uint8).copy())
            got = output.view(DTYPES[output_datatype]).reshape(5, HIDDEN)
            expected = torch.from_numpy(over_http.copy()).to(got.dtype)
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)


async def test_a_line_that_repeats_is_read_again(tmp_path: Path) -> None:
    async with channel(tmp_path, EchoRunner(), request={"num_slots": 1}) as (_, peer):
        for value in (1.0, 2.0, 3.0):
            hidden_states = np.full((2, HIDDEN), value, np.float32)
            assert np.array_equal(await asyncio.to_thread(peer.infer, hidden_states), hidden_states)
        good, bad = np.array([[0, 1]], np.int32), np.array([[0, 5]], np.int32)
        weights = np.ones((1, TOP_K), np.float32)
        await asyncio.to_thread(peer.infer, rows(1), good, weights)
        with pytest.raises(ValueError, match="400: topk_ids: expected 0 to 3"):
            await asyncio.to_thread(peer.infer, rows(1), bad, weights)
        await asyncio.to_thread(peer.infer, rows(1), good, weights)


async def test_places_of_the_callers_own(tmp_path: Path) -> None:
    async with channel(tmp_path, EchoRunner(), request={"memory": {"system": {"byte_size": 64 * 1024}}}) as (
        _,
        peer,
    ):
        assert (peer.data_bytes, peer.data_slot_bytes) == (64 * 1024, 0)
        last = 64 * 1024 - 2 * HIDDEN * 4
        peer.array(last, (2, HIDDEN), np.float32)[:] = rows(2)
        answer = await answer_to(peer, peer.send(2, (last, 0, 0, 64)))
        assert answer.status == 200
        assert np.array_equal(peer.array(64, (2, HIDDEN), np.float32), rows(2))


async def test_no_tokens_need_no_step(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel(tmp_path, runner) as (_, peer):
        assert (await answer_of(peer, 0)).status == 200
        assert (await answer_of(peer, 0, routed=True)).status == 200
    assert runner.steps == []


async def test_channels_and_http_share_steps_and_answers_come_out_of_order(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner, {"max_batch_tokens": 64}) as server:
        one, other = await claimed(server), await claimed(server)
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        sent = [peer.send(tokens, peer.places(n)) for peer, tokens, n in ((one, 2, 1), (other, 3, 1))]
        invalid = one.send(17, one.places(2))
        await until(lambda: server.metric("queue_requests", model="tiny") == 2)
        over_http = asyncio.ensure_future(server.infer(*hidden_request(rows(4))))
        await until(lambda: server.metric("queue_requests", model="tiny") == 3)
        runner.gate.set()
        output_of(await first)
        output_of(await over_http)
        answers = [await answer_to(peer, n) for peer, n in zip((one, other), sent, strict=True)]
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[0].compute_seconds == 0.001
        assert answers[0].queue_seconds >= 0
        assert (await answer_to(one, invalid)).status == 400
        one.close()
        other.close()
    assert runner.steps == [[1], [2, 3, 4]]


async def test_a_full_queue_says_when_to_retry(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner, {"max_queue_requests": 1}) as server:
        peer, first = await held(server, runner)
        other = await claimed(server)
        over_http = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        sequence = other.send(1, other.places(1))
        runner.gate.set()
        answer = await answer_to(other, sequence)
        # It is read after the step, when the queue holds the request over HTTP.
        assert (answer.status, answer.retry_after) == (503, 1.0)
        assert "the queue of model tiny is full" in answer.error
        assert (await answer_to(peer, first)).status == 200
        output_of(await over_http)
        assert (await answer_of(other)).status == 200
        assert server.metric("refusals_total", model="tiny", reason="queue_full") == 1
        peer.close()
        other.close()


async def held(server: Serving, runner: EchoRunner, **request: Any) -> tuple[Peer, int]:
    """A channel whose first request is in a step that waits at the runner's gate."""
    peer = await claimed(server, **request)
    runner.gate.clear()
    sequence = peer.send(1, peer.places(1))
    assert await asyncio.to_thread(runner.entered.acquire, True, 60)
    return peer, sequence


async def test_a_request_waits_no_longer_than_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "note", lambda *_: None)  # else a slow step has it refused before
    runner = EchoRunner()
    runner.gate = gate = Turnstile()
    async with channel(tmp_path, runner, {"max_batch_tokens": 64}) as (server, peer):
        blocker = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        full_step = asyncio.ensure_future(server.infer(*hidden_request(rows(64))))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        timeouts = {2: 60.0, 3: 0.05, 4: 0.0, 5: 0.02}  # tokens -> seconds
        sent = {
            tokens: peer.send(tokens, peer.places(number), timeout=seconds)
            for number, (tokens, seconds) in enumerate(timeouts.items(), 1)
        }
        gate.let_one_through()
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        for tokens, seconds in ((5, 0.02), (3, 0.05)):
            answer = await answer_to(peer, sent[tokens])
            expected = f"the request's timeout of {round(seconds * 1e6)} microseconds expired in the queue"
            assert (answer.status, answer.error) == (503, expected)
            assert answer.queue_seconds >= seconds
        gate.set()
        for tokens in (2, 4):
            assert (await answer_to(peer, sent[tokens])).status == 200
        output_of(await blocker)
        output_of(await full_step)
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 4)
        assert server.metric("refusals_total", model="tiny", reason="queue_timeout") == 2
    assert runner.steps == [[1], [64], [2, 4]]


async def test_urgent_requests_of_channels_and_http_come_first(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner, {"max_batch_tokens": 64}) as server:
        peer, first = await held(server, runner, max_tokens=64)
        sent = [peer.send(64, peer.places(1), priority=0), peer.send(63, peer.places(2), priority=127)]
        server.app.engine.executor.poll_sources()
        http = asyncio.ensure_future(server.infer(*hidden_request(rows(62), parameters={"priority": 5})))
        await until(lambda: server.metric("queue_requests", model="tiny") == 3)
        runner.gate.set()
        for sequence in (first, *sent):
            assert (await answer_to(peer, sequence)).status == 200
        output_of(await http)
        peer.close()
    assert runner.steps == [[1], [62], [63], [64]]


async def test_requests_and_refusals_are_counted_and_each_refusal_is_one_line_at_debug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "expertd.service.channels.hub")
    async with channel(tmp_path, EchoRunner(poison=666.0)) as (server, peer):
        await asyncio.to_thread(peer.infer, rows(2))
        assert (await answer_of(peer, 17)).error == "num_tokens: expected at most 16, got 17"
        poisoned = np.full((1, HIDDEN), 666.0, np.float32)
        with pytest.raises(ValueError, match="500: the step failed: RuntimeError"):
            await asyncio.to_thread(peer.infer, poisoned)
        await until(lambda: server.metric("requests_total", model="tiny", status="500") == 1)
        assert server.metric("requests_total", model="tiny", status="200") == 1
        assert server.metric("requests_total", model="tiny", status="400") == 1
        assert server.metric("request_seconds_count", model="tiny") == 1
        assert server.metric("refusals_total", model="tiny", reason="too_many_tokens") == 1
        assert server.metric("refusals_total", model="tiny", reason="step_failed") == 1
        # What a step has computed is counted when nothing else waits.
        await until(lambda: server.metric("tokens_total", model="tiny", layout="masked") == 2)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    refused = [line for line in lines if line[:3].isdigit()]
    expected = "model tiny, channel 1, request 2: num_tokens: expected at most 16, got 17"
    assert refused[0] == f"400 too_many_tokens: {expected}"
    assert [line[:15] for line in refused[1:]] == ["500 step_failed"]


async def test_machines_with_weaker_order_get_a_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expertd_client.channel.fence._WEAKLY_ORDERED", True)
    async with channel(tmp_path, EchoRunner()) as (_, peer):
        assert np.array_equal(await asyncio.to_thread(peer.infer, rows(3)), rows(3))


async def test_a_draining_server_answers_what_it_has_accepted(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner) as server:
        peer, accepted = await held(server, runner)
        draining = asyncio.ensure_future(server.app.engine.drain())
        await until(lambda: server.app.engine.draining)
        await asyncio.sleep(0)
        refused = peer.send(1, peer.places(2))
        assert not draining.done()
        runner.gate.set()
        assert (await answer_to(peer, accepted)).status == 200
        assert await draining
        answer = await answer_to(peer, refused)
        assert (answer.status, answer.error) == (503, "the server is shutting down")
        response = await server.http.post(
            "/v1/channels", json={"version": 3, "model": "tiny", "num_slots": 1, "max_tokens": 1}
        )
        assert error_of(response, 503) == "the server is shutting down"
        peer.close()
    assert runner.steps == [[1]]


async def test_callers_at_once_get_their_own_rows(tmp_path: Path) -> None:
    def call(peer: Peer, seed: int) -> None:
        for number in range(30):
            hidden_states = rows(1 + (seed + number) % 16, 100 * seed + number)
            assert np.array_equal(peer.infer(hidden_states), hidden_states)

    async with channel_server(tmp_path, EchoRunner()) as server:
        peers = [await claimed(server, num_slots=1 + seed) for seed in range(4)]
        await asyncio.gather(*(asyncio.to_thread(call, peer, seed) for seed, peer in enumerate(peers)))
        for peer in peers:
            peer.close()


async def test_the_log_has_a_line_for_each_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keys = write_keys(tmp_path / "keys.yaml", mine=["infer"])
    more: dict[str, Any] = {"keys": str(keys), "access_log": True, "log_format": "json"}
    async with channel_server(tmp_path, EchoRunner(), **more) as server:
        server.http.headers.update(bearer("mine"))
        peer = await claimed(server)
        await answer_of(peer, 3)
        await until(lambda: any(line.message == "infer 200" for line in caplog.records))
        peer.close()
    (fields,) = (vars(line)["fields"] for line in caplog.records if line.message == "infer 200")
    assert (fields["model"], fields["key"], fields["tokens"]) == ("tiny", "mine", 3)
    assert fields["request_id"] == "1/1"
    assert fields["seconds"] > fields["queue_seconds"] > 0
