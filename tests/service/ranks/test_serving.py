"""A server with several ranks answers as one with a single process does."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertd.service.memory import host_view
from expertd.service.moe.batch import FLOATS
from expertd.service.moe.request import LayerRequest
from tests.service.apps import (
    HIDDEN,
    MODEL,
    NUM_EXPERTS,
    TOP_K,
    Serving,
    binary_request,
    json_input,
    json_request,
    output_of,
    rows,
    serving,
    tiny_settings,
)
from tests.service.channels.servers import claimed
from tests.service.ranks.servers import close, cpu_seconds, output_for, rank_processes, serving_ranks
from tests.service.waiting import until

pytestmark = pytest.mark.slow  # each server starts processes

LIMITS = {"max_request_tokens": 1024, "max_batch_tokens": 1024}
SHARED = {**MODEL, "num_shared_experts": 2, "num_experts": 7, "weights": {"seed": 5}}


def routing(num_tokens: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Random distinct experts and weights."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K]
    return ids.astype(np.int32), random.random((num_tokens, TOP_K), np.float32)


async def routed(server: Serving, values: NDArray[np.float32], datatype: str) -> NDArray[np.float32]:
    """The output for given routing, with ids of `datatype`, in a binary request."""
    ids, weights = routing(len(values))
    tensors = {
        "hidden_states": ("FP32", list(values.shape), values.tobytes()),
        "topk_ids": (datatype, list(ids.shape), ids.astype(datatype.lower()).tobytes()),
        "topk_weights": ("FP32", list(weights.shape), weights.tobytes()),
    }
    body, length = binary_request(tensors, parameters={"binary_data_output": True})
    return output_of(await server.infer(body, length))


@pytest.mark.parametrize("ranks", [2, 4])
async def test_outputs_are_those_of_one_process(ranks: int) -> None:
    async with (
        serving(tiny_settings(LIMITS)) as one,
        serving_ranks(tiny_settings(LIMITS, ranks=ranks)) as server,
    ):
        for num_tokens in (1, 2, 3, 5, 64, 1000):  # fewer than ranks, and more; small bodies, and large ones
            values = rows(num_tokens, seed=num_tokens)
            assert close(await output_for(server, values), await output_for(one, values)), num_tokens
            for datatype in ("INT32", "INT64"):
                assert close(await routed(server, values, datatype), await routed(one, values, datatype))
        body = json_request(json_input(rows(3)))
        assert close(output_of(await server.infer(body)), output_of(await one.infer(body)))


async def test_shared_experts_and_uneven_parts() -> None:
    """7 experts on 2 ranks, and 2 shared ones, which each rank runs for its own tokens."""
    async with (
        serving(tiny_settings(models=[SHARED])) as one,
        serving_ranks(tiny_settings(models=[SHARED], ranks=2)) as server,
    ):
        values = rows(9)
        assert close(await output_for(server, values), await output_for(one, values))


def request(
    values: NDArray[np.float32], datatype: str, output_datatype: str, given: bool = False
) -> LayerRequest:
    """A request of the runner, as bytes."""
    hidden_states = torch.from_numpy(values).to(FLOATS[datatype]).view(torch.uint8).numpy().tobytes()
    ids, weights = (tensor.tobytes() if given else None for tensor in routing(len(values)))
    return LayerRequest(len(values), hidden_states, datatype, ids, "INT32", weights, output_datatype)


async def outputs_of(server: Serving, requests: Sequence[LayerRequest]) -> list[NDArray[np.float32]]:
    """The outputs of one step."""
    assert server.app.engine.loaded is not None
    runner = server.app.engine.loaded.runners["tiny"]
    result = await asyncio.to_thread(lambda: runner.begin(requests).finish())
    assert result.num_tokens == sum(request.num_tokens for request in requests)
    assert result.tokens_per_expert.sum() == TOP_K * result.num_tokens
    tensors = [
        torch.frombuffer(bytearray(host_view(output)), dtype=FLOATS[request.output_datatype])
        for request, output in zip(requests, result.outputs, strict=True)
    ]
    return [tensor.float().numpy().reshape(-1, HIDDEN) for tensor in tensors]


async def test_requests_of_one_step_may_differ() -> None:
    """In datatypes and routing: no rank sees all of a step, but all must exchange the same dtypes."""
    steps = [
        [request(rows(1), "BF16", "BF16")],  # rank 1 has no token
        [request(rows(3), "BF16", "FP32"), request(rows(1, 1), "FP32", "BF16")],
        [request(rows(1), "FP16", "FP32", True), request(rows(2, 1), "FP16", "FP32")],
        [request(rows(1), "FP32", "FP32", True)] * 3,
    ]
    async with serving(tiny_settings()) as one, serving_ranks(tiny_settings(ranks=2)) as server:
        for step in steps:
            expected, got = await outputs_of(one, step), await outputs_of(server, step)
            for row, want, sent in zip(got, expected, step, strict=True):
                tolerance = 2**-7 if sent.output_datatype == "BF16" else 2e-5
                assert np.abs(row - want).max() <= tolerance * np.abs(want).max()


async def test_channels_and_metrics(tmp_path: Path) -> None:
    settings = tiny_settings(ranks=2, channels={"socket": str(tmp_path / "channels")})
    async with serving_ranks(settings) as server:
        peer = await claimed(server)
        for num_tokens in (1, 2, 16):
            values, (ids, weights) = rows(num_tokens, num_tokens), routing(num_tokens)
            got = await asyncio.to_thread(peer.infer, values)
            assert close(got, await output_for(server, values))
            got = await asyncio.to_thread(peer.infer, values, ids, weights)
            assert close(got, await routed(server, values, "INT32"))
        peer.close()
        tokens = 4 * (1 + 2 + 16)
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


async def test_a_rank_without_work_uses_less_than_a_hundredth_of_a_core() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server:
        await output_for(server, rows(1))
        ranks = rank_processes()
        before = cpu_seconds(ranks)
        await asyncio.sleep(3.0)  # the time that is measured
        assert cpu_seconds(ranks) - before <= 0.01 * 3.0 * len(ranks)
