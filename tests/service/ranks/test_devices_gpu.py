"""Ranks on all GPUs answer as one GPU does, and come back after one is lost."""

import asyncio
import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from expertd.backends import BACKENDS
from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.engine.memory_needs import expert_slots
from expertd.service.moe.expert_budget import chunks_bytes
from expertd.service.moe.needs import part_of_layer, stored_shape
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.settings.model import Settings
from expertd.service.settings.served import CheckpointSettings
from tests.families import Sizes
from tests.service.apps import MODEL, Serving, binary_request, rows, serving, tiny_settings
from tests.service.checkpoints.builders import Checkpoint
from tests.service.ranks.servers import computed, output_for, rank_processes, serving_ranks
from tests.service.ranks.steps import routed
from tests.service.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS = min(8, torch.cuda.device_count())
DEVICES = f"0-{RANKS - 1}"
LIMITS = {
    "max_request_tokens": 1024,
    "max_batch_tokens": 1024,
    "max_queue_tokens": 4096,
    "max_body_bytes": 1 << 23,
}
LAYER = {
    **MODEL,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_experts": 32,
    "top_k": 6,
    "num_shared_experts": 1,
}
SMALL = [{**MODEL, "num_experts": 8}]
COUNTS = (1, 2, 3, 5, 64, 1000)  # fewer than ranks, odd, small bodies and large ones


def close(got: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """Within one rounding to bf16 of each rank's sum: 2^-9 of at most the largest, for each."""
    return bool(np.abs(got - expected).max() <= RANKS * 2**-9 * np.abs(expected).max())


def inputs() -> list[NDArray[np.float32]]:
    """hidden_states of each count, fresh."""
    random = np.random.default_rng()
    return [random.standard_normal((count, 1024), np.float32) for count in COUNTS]


async def test_outputs_are_those_of_one_gpu() -> None:
    await compare(LAYER)


async def test_a_shared_expert_with_a_gate(tmp_path: Path) -> None:
    shape, path = LayerShape(1024, 512, 32, 6, num_shared_experts=1), tmp_path / "layer.safetensors"
    gate = torch.linspace(-0.1, 0.2, 1024)
    save_weights(path, replace(random_weights(shape, 3, "cpu"), shared_gate=gate))
    await compare(LAYER | {"weights": {"path": str(path)}})


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("family", "sizes"), [("gpt-oss", Sizes(208, 160)), ("llama-4", Sizes())])
def test_families_with_biases_or_weights_on_inputs(
    family: str, sizes: Sizes, exact: bool, tmp_path: Path
) -> None:
    directory = Checkpoint(family, tmp_path / "model", dtype=torch.float32, sizes=sizes).directory
    served = (CheckpointSettings(path=directory, layers="1", datatype="FP32"),)
    one, several = (
        resolve_checkpoints(Settings.model_validate({"backend": "hopper", "checkpoints": served} | more))
        for more in ({}, {"devices": "0-1", "exact_combine": exact})
    )
    hidden = one.models[0].hidden_size
    expected = computed(one, hidden)
    assert np.abs(expected).max() > 0
    assert close(computed(several, hidden), expected)


async def compare(layer: dict[str, Any]) -> None:
    """Fail unless ranks answer as one GPU does."""
    settings = tiny_settings(LIMITS, backend="hopper", models=[layer])
    async with serving(settings) as server:
        values = inputs()
        expected = [await output_for(server, value) for value in values]
    settings = tiny_settings(LIMITS, backend="hopper", models=[layer], devices=DEVICES)
    async with serving_ranks(settings) as server:
        for _ in range(3):
            for value, wanted in zip(values, expected, strict=True):
                got = await output_for(server, value)
                assert close(got, wanted), (len(value), np.abs(got - wanted).max(), np.abs(wanted).max())
                again = await output_for(server, value)
                assert np.array_equal(got, again), "the same bits in every run"


async def bf16_output(
    server: Serving, values: NDArray[np.float32], given: bool, datatype: str = "FP32"
) -> NDArray[np.float32]:
    """The output in `datatype` for values in BF16, perhaps with routing; few of them are a graph."""
    rounded = torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    tensors = {"hidden_states": ("BF16", list(values.shape), rounded.tobytes())}
    if given:
        ids = (np.arange(len(values))[:, None] + np.arange(6) * 5).astype(np.int32) % 32
        weights = np.linspace(0.1, 1, ids.size, dtype=np.float32).reshape(ids.shape)
        tensors["topk_ids"] = ("INT32", list(ids.shape), ids.tobytes())
        tensors["topk_weights"] = ("FP32", list(ids.shape), weights.tobytes())
    outputs = [{"name": "hidden_states", "parameters": {"datatype": datatype}}]
    body = binary_request(tensors, parameters={"binary_data_output": True}, outputs=outputs)
    response = await server.infer(*body)
    assert response.status_code == 200, response.text
    data = response.content[int(response.headers["inference-header-content-length"]) :]
    dtype = torch.float32 if datatype == "FP32" else torch.bfloat16
    return torch.frombuffer(bytearray(data), dtype=dtype).float().numpy().reshape(values.shape)


@pytest.mark.parametrize("given", [False, True])
async def test_steps_that_are_graphs(given: bool) -> None:
    async with serving(tiny_settings(LIMITS, backend="hopper", models=[LAYER])) as server:
        values = inputs()
        expected = [await bf16_output(server, value, given) for value in values]
    settings = tiny_settings(LIMITS, backend="hopper", models=[LAYER], devices=DEVICES)
    async with serving_ranks(settings) as server:
        for _ in range(3):
            for value, wanted in zip(values, expected, strict=True):
                got = await bf16_output(server, value, given)
                assert close(got, wanted), (len(value), np.abs(got - wanted).max(), np.abs(wanted).max())
        together = await asyncio.gather(*(bf16_output(server, value, given) for value in values))
        for got, wanted in zip(together, expected, strict=True):
            assert close(got, wanted)


def slots_of(settings: Settings, experts: int) -> int:
    """A budget that gives each rank this many slots, beside shared experts and chunks."""
    shape = stored_shape(settings.models[0].shape, BACKENDS["hopper"])
    held = part_of_layer(shape, -(-len(shape.held_experts) // settings.num_ranks))
    shared = shape.num_shared_experts * shape.shared_expert_bytes
    return experts * shape.expert_bytes + shared + chunks_bytes([held])


@pytest.mark.parametrize("exact", [False, True])
async def test_experts_in_the_hosts_memory_give_the_same_bits(exact: bool) -> None:
    """Small steps find experts in slots, and large ones need more than there are."""
    settings = tiny_settings(LIMITS, backend="hopper", models=[LAYER], devices="0-1", exact_combine=exact)
    budgeted = settings.model_copy(update={"weights_budget": slots_of(settings, 8)})
    assert expert_slots(budgeted, BACKENDS["hopper"]) == {"tiny": 8}, "of 16"
    values, outputs = [*inputs(), *inputs()], list[list[NDArray[np.float32]]]()
    for each in (settings, budgeted):
        async with serving_ranks(each) as server:
            got = []
            for given, datatype in itertools.product((False, True), ("FP32", "BF16")):
                got += [await bf16_output(server, value, given, datatype) for value in values]
            got += [await output_for(server, value) for value in values]
            got += await asyncio.gather(*(bf16_output(server, value, False) for value in values))
            outputs.append(got)
            if each is settings:
                continue
            for rank in "01":
                hits, misses, copied, waited = (
                    server.metric(f"rank_expert_store_{name}_total", rank=rank)
                    for name in ("hits", "misses", "copy_bytes", "wait_seconds")
                )
                assert min(hits, misses, waited) > 0
                assert copied == misses * each.models[0].shape.expert_bytes
    for number, (whole, stored) in enumerate(zip(*outputs, strict=True)):
        assert np.array_equal(whole, stored), (number, len(whole))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("family", "encoding"),
    [
        ("gpt-oss", {"dtype": torch.float32, "sizes": Sizes(208, 160, experts=32)}),
        ("llama-4", {"dtype": torch.float32, "sizes": Sizes(experts=32)}),
        ("gpt-oss", {"mxfp4": True, "sizes": Sizes(experts=32)}),
    ],
)
def test_families_with_experts_in_the_hosts_memory(
    family: str, encoding: dict[str, Any], exact: bool, tmp_path: Path
) -> None:
    directory = Checkpoint(family, tmp_path / "model", **encoding).directory
    served = (CheckpointSettings(path=directory, layers="1", datatype="FP32"),)
    given = {"backend": "hopper", "checkpoints": served, "devices": "0-1", "exact_combine": exact}
    whole = resolve_checkpoints(Settings.model_validate(given))
    budgeted = whole.model_copy(update={"weights_budget": slots_of(whole, 8)})
    assert list(expert_slots(budgeted, BACKENDS["hopper"]).values()) == [8], "of 16"
    hidden = whole.models[0].hidden_size
    stored, expected = computed(budgeted, hidden), computed(whole, hidden)
    # Weights that the host has quantized, not the GPU, may differ in their last bit.
    assert np.array_equal(stored, expected) if "mxfp4" in encoding else close(stored, expected)


async def test_steps_that_recur_compute_what_is_there_now() -> None:
    """The same memory with new values each time, in BF16, which is a graph if it is small, and in FP32."""
    random = np.random.default_rng()
    values = [random.standard_normal((count, 1024), np.float32) for count in (1, 64, 700) for _ in range(9)]

    async def outputs(server: Serving) -> list[NDArray[np.float32]]:
        small = [await bf16_output(server, value, False) for value in values]
        return [*small, *[await output_for(server, value) for value in values]]

    async with serving(tiny_settings(LIMITS, backend="hopper", models=[LAYER])) as server:
        expected = await outputs(server)
    settings = tiny_settings(LIMITS, backend="hopper", models=[LAYER], devices=DEVICES)
    async with serving_ranks(settings) as server:
        for got, wanted in zip(await outputs(server), expected, strict=True):
            assert close(got, wanted), len(got)


async def test_given_routing() -> None:
    async with serving(tiny_settings(LIMITS, backend="hopper", models=SMALL)) as server:
        expected = await routed(server, rows(33), "INT64")
    async with serving_ranks(
        tiny_settings(LIMITS, backend="hopper", models=SMALL, devices=DEVICES)
    ) as server:
        assert close(await routed(server, rows(33), "INT64"), expected)


async def test_overlap_keeps_the_bits() -> None:
    wide = {**LAYER, "hidden_size": 2304}  # two parts
    random = np.random.default_rng()
    values = [random.standard_normal((count, 2304), np.float32) for count in (1, 3, 64, 600)]
    got = {}
    for mode in ("never", "always"):
        settings = tiny_settings(
            LIMITS, backend="hopper", models=[wide], devices=DEVICES, overlap={"mode": mode}
        )
        async with serving_ranks(settings) as server:
            got[mode] = [await bf16_output(server, value, given=True) for value in values * 4]
    for one, other in zip(got["never"], got["always"], strict=True):
        assert np.array_equal(one, other)


async def test_partitions_change_on_both_gpus() -> None:
    settings = tiny_settings(
        LIMITS, backend="hopper", devices=DEVICES,
        models=[{**LAYER, "partition": "experts"}], partitions={"experts": 64},
    )  # fmt: skip
    async with serving_ranks(settings) as server:
        values = inputs()
        expected = [await bf16_output(server, value, given=True) for value in values]
        for sizes, status in (({"experts": 100, "other": 16}, 200), ({"experts": 132, "other": 16}, 422)):
            response = await server.http.put("/v1/partitions", json={"partitions": sizes})
            assert response.status_code == status, response.text
            for value, wanted in zip(values, expected, strict=True):
                assert np.array_equal(await bf16_output(server, value, given=True), wanted)
        shown = (await server.http.get("/v1/partitions")).json()
        assert list(shown["partitions"]) == ["experts", "other"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_gpu_rank(number: signal.Signals) -> None:
    async with serving_ranks(
        tiny_settings(LIMITS, backend="hopper", models=SMALL, devices=DEVICES)
    ) as server:
        expected = await output_for(server, rows(8))
        os.kill(rank_processes()[1], number)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        await until(lambda: server.app.engine.why_not_ready() is None)
        assert np.array_equal(await output_for(server, rows(8)), expected)
        await answers(server)


async def answers(server: Serving) -> None:
    """The server is alive and ready."""
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert (await server.http.get(path)).status_code == 200
