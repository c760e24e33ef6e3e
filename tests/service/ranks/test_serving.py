"""A server with several ranks answers as one with a single process does."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertd.kernels import expand_rows, quantize_rows
from expertd.service.moe.request import FP8, LayerRequest, fp8_rows
from expertd.service.ranks.front.loading import load_ranks
from tests.service.apps import (
    MODEL,
    NUM_EXPERTS,
    TOP_K,
    binary_request,
    json_input,
    json_request,
    output_of,
    rows,
    serving,
    tiny_settings,
)
from tests.service.channels.servers import answer_to, claimed
from tests.service.competing import CHUNKS, holding, in_chunks, polled
from tests.service.ranks.servers import (
    check_steps_at_once,
    close,
    cpu_seconds,
    output_for,
    rank_processes,
    serving_ranks,
)
from tests.service.ranks.steps import LIMITS, outputs_of, request, routed, routing
from tests.service.waiting import until

pytestmark = pytest.mark.slow  # each server starts processes

SHARED = {**MODEL, "num_shared_experts": 2, "num_experts": 7, "weights": {"seed": 5}}


STEPS = [  # of requests that differ in datatypes and routing: all ranks must exchange the same dtypes
    [request(rows(1), "BF16", "BF16")],  # one rank has a token
    [request(rows(3), "BF16", "FP32"), request(rows(1, 1), "FP32", "BF16")],
    [request(rows(1), "FP16", "FP32", True), request(rows(2, 1), "FP16", "FP32")],
    [request(rows(1), "FP32", "FP32", True)] * 3,
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
async def test_outputs_are_those_of_one_process(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(tiny_settings(LIMITS)) as one,
        serving_ranks(tiny_settings(LIMITS, ranks=ranks)) as server,
    ):
        await check_steps_at_once(server, one, monkeypatch)  # before small requests come
        for num_tokens in (1, 2, 3, 5, 64, 1000):  # fewer than ranks, and more; small bodies, and large ones
            values = rows(num_tokens, seed=num_tokens)
            assert close(await output_for(server, values), await output_for(one, values)), num_tokens
            for datatype in ("INT32", "INT64"):
                assert close(await routed(server, values, datatype), await routed(one, values, datatype))
        body = json_request(json_input(rows(3)))
        assert close(output_of(await server.infer(body)), output_of(await one.infer(body)))
        for step in STEPS:
            expected, got = await outputs_of(one, step), await outputs_of(server, step)
            assert all(map(close, got, expected))


async def test_outputs_in_chunks_are_those_of_whole_requests(tmp_path: Path) -> None:
    loader, held = holding(load_ranks)
    long = rows(64, 5)
    settings = tiny_settings(CHUNKS, ranks=2, channels={"socket": str(tmp_path / "channels")})
    async with serving(settings, loader) as server:
        (runner,) = held
        whole = await output_for(server, long)
        assert close(await in_chunks(server, runner, lambda: output_for(server, long)), whole)
        for ids in ("INT32", "INT64"):
            whole = await routed(server, long, ids)
            got = await in_chunks(server, runner, lambda ids=ids: routed(server, long, ids))  # type: ignore[misc]
            assert close(got, whole)
        peer = await claimed(server, max_tokens=64)
        async with polled(server):
            whole = await asyncio.to_thread(peer.infer, long)
            assert close(await in_chunks(server, runner, lambda: asyncio.to_thread(peer.infer, long)), whole)
        peer.close()


@pytest.mark.parametrize(("local_experts", "shared_experts"), [("2-4", True), (None, False)])
async def test_shared_experts_and_uneven_parts(local_experts: str | None, shared_experts: bool) -> None:
    """7 experts, or some of them, on 2 ranks, and 2 shared ones, which each rank runs for its own tokens."""
    model = {**SHARED, "local_experts": local_experts, "shared_experts": shared_experts}
    async with (
        serving(tiny_settings(models=[model])) as one,
        serving_ranks(tiny_settings(models=[model], ranks=2)) as server,
    ):
        values = rows(9)
        assert close(await output_for(server, values), await output_for(one, values))
        if local_experts is not None:
            of_expert = [server.metric("expert_tokens_total", model="tiny", expert=str(e)) for e in range(7)]
            assert sum(of_expert[2:5]) == sum(of_expert) > 0
        asked = [await each.http.get("/v2/models/tiny") for each in (one, server)]
        described, same = (answer.json()["parameters"] for answer in asked)
        assert described == same, "the identity of the weights, too"
        assert described["shared_experts"] == ("included" if shared_experts else "excluded")


async def test_channels_and_metrics(tmp_path: Path) -> None:
    settings = tiny_settings(ranks=2, channels={"socket": str(tmp_path / "channels")})
    async with serving_ranks(settings) as server:
        peer = await claimed(server)
        for num_tokens in (1, 2, 16):
            values, (ids, weights) = rows(num_tokens, num_tokens), routing(num_tokens)
            got = await asyncio.to_thread(peer.infer, values)
            assert close(got, await output_for(server, values))
            late = await asyncio.to_thread(peer.infer, values, timeout=60.0)
            assert (late == got).all(), "a timeout changes no bits"
            got = await asyncio.to_thread(peer.infer, values, ids, weights)
            assert close(got, await routed(server, values, "INT32"))
        peer.close()
        tokens = 5 * (1 + 2 + 16)
        await until(lambda: server.metric("tokens_total", model="tiny", layout="contiguous") == tokens)
        experts = [
            server.metric("expert_tokens_total", model="tiny", expert=str(expert))
            for expert in range(NUM_EXPERTS)
        ]
        assert sum(experts) == TOP_K * tokens
        of_ranks = [server.metric("rank_expert_tokens_total", rank=rank) for rank in "01"]
        assert of_ranks == [sum(experts[:2]), sum(experts[2:])]
        for rank in "01":
            assert server.metric("rank_up", rank=rank) == server.metric("rank_starts_total", rank=rank) == 1
            assert server.metric("rank_compute_seconds_total", rank=rank) > 0
            value = server.app.metrics.registry.get_sample_value
            assert value("expertd_rank_jit_compilations_total", {"rank": rank}) == 0, "it says so"
            assert value("expertd_rank_device_memory_used_bytes", {"rank": rank}) is None, "a CPU"


async def test_a_rank_without_work_uses_less_than_a_hundredth_of_a_core() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server:
        await output_for(server, rows(1))
        ranks = rank_processes()
        before = cpu_seconds(ranks)
        await asyncio.sleep(3.0)  # the time that is measured
        assert cpu_seconds(ranks) - before <= 0.01 * 3.0 * len(ranks)


def quantized(count: int, seed: int) -> tuple[bytes, bytes, NDArray[np.float32]]:
    """e4m3 values, their scales, and the same numbers in FP32."""
    made = quantize_rows(torch.from_numpy(rows(count, seed)))
    scales = made.scales.contiguous()
    values = made.data.view(torch.uint8).numpy().tobytes()
    return values, scales.numpy().tobytes(), expand_rows(made.data, scales).numpy()


def fp8_request(count: int, seed: int, given: bool = False) -> tuple[LayerRequest, LayerRequest]:
    """A request, and the same numbers in FP32."""
    values, scales, floats = quantized(count, seed)
    wanted = request(floats, "FP32", "FP32", given)
    return replace(wanted, hidden_states=fp8_rows(values, scales, count), datatype=FP8), wanted


async def test_the_answer_is_that_of_the_values(tmp_path: Path) -> None:
    settings = tiny_settings(ranks=3, channels={"socket": str(tmp_path / "channels")})
    async with serving_ranks(settings) as server:
        peer = await claimed(server)
        for count in (1, 2, 5, 16):
            values, scales, floats = quantized(count, count)
            wanted = await output_for(server, floats)
            tensors = {
                "hidden_states": ("UINT8", list(floats.shape), values),
                "hidden_states_scale": ("FP32", [count, 1], scales),
            }
            body, length = binary_request(tensors, parameters={"binary_data_output": True})
            assert np.array_equal(output_of(await server.infer(body, length)), wanted)
            places = peer.places(peer.sequence + 1)
            given = np.frombuffer(fp8_rows(values, scales, count), np.uint8)
            peer.array(places[0], given.shape, np.uint8)[:] = given
            answer = await answer_to(peer, peer.send(count, places, datatype=FP8, output_datatype="FP32"))
            assert answer.status == 200, answer.error
            assert np.array_equal(peer.array(places[3], floats.shape, np.float32), wanted)
        peer.close()


async def test_steps_of_several_datatypes() -> None:
    """Some ranks have rows of one datatype alone, and some have none."""
    (one, same), (other, same_other) = fp8_request(1, 0), fp8_request(3, 1, given=True)
    floats = request(rows(2, 2), "BF16", "FP32")
    steps = [
        ([one], [same]),
        ([one, other], [same, same_other]),
        ([floats, other], [floats, same_other]),
        ([other, floats, one], [same_other, floats, same]),
    ]
    async with serving(tiny_settings()) as single, serving_ranks(tiny_settings(ranks=2)) as server:
        for step, wanted in steps:
            expected, got = await outputs_of(single, wanted), await outputs_of(server, step)
            assert all(map(close, got, expected))
