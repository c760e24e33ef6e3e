"""Requests whose tensors are in shared memory, or that name it wrongly."""

import asyncio
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.loading import load
from expertd.service.moe.request import LayerRequest, StepResult
from tests.service.apps import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    binary_request,
    error_of,
    hidden_request,
    json_input,
    json_request,
    limits_for,
    output_of,
    rows,
    serving,
    serving_runner,
)
from tests.service.regions import (
    ROW,
    SYSTEM,
    AddressRunner,
    Device,
    enabled,
    place,
    region,
    region_input,
    region_output,
    register_cuda,
    registered,
)
from tests.service.runners import EchoRunner
from tests.service.shm import shm_file
from tests.service.waiting import until


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 0])
async def test_the_answer_is_that_of_the_same_request_without_regions(
    on_device: bool, num_tokens: int
) -> None:
    values, size = rows(num_tokens), ROW * num_tokens
    async with serving(enabled(), Device().loader() if on_device else load) as server:
        expected = output_of(await server.infer(*hidden_request(values)))
        with shm_file(1 << 16) as file:
            file.write(values, 4096 + 16)
            await registered(server, "r", file.key, (1 << 16) - 4096, 4096)
            given = region_input("r", [num_tokens, HIDDEN], 16)
            in_json = await server.infer(json_request(given))
            np.testing.assert_array_equal(output_of(in_json), expected)
            answer = await server.infer(
                json_request(given, outputs=region_output("r", size + 32, 8192), id="x")
            )
            assert answer.status_code == 200
            assert "inference-header-content-length" not in answer.headers
            assert answer.json() == {
                "model_name": "tiny",
                "model_version": "1",
                "id": "x",
                "outputs": [
                    {
                        "name": "hidden_states",
                        "shape": [num_tokens, HIDDEN],
                        "datatype": "FP32",
                        "parameters": {**place("r", size + 32), "shared_memory_offset": 8192},
                    }
                ],
            }
            np.testing.assert_array_equal(file.floats(num_tokens, HIDDEN, 4096 + 8192), expected)
            assert file.read(64, 4096 + 8192 + size) == bytes(64), "nothing behind the output"
            sent = await server.infer(
                *hidden_request(values, outputs=region_output("r", size, 8192)), Accept_Encoding="gzip"
            )
            assert sent.status_code == 200, "inputs in the body, output in a region"


async def test_large_tensors_are_copied_through_the_arena() -> None:
    # Memory for three inputs and outputs, and one more input.
    limits = {**limits_for(1024), "max_body_bytes": 1 << 16, "max_buffered_bytes": 7 << 19}
    runner, values = EchoRunner(), rows(1024)
    async with (
        serving(enabled(limits), serving_runner(runner)) as server,
        region(server, 2 * values.nbytes) as file,
    ):
        file.write(values)
        given = region_input("r", list(values.shape))
        body = json_request(given, outputs=region_output("r", values.nbytes, values.nbytes))
        runner.gate.clear()
        first = asyncio.create_task(server.infer(body))
        await runner.begun()
        assert server.arena.used_bytes == 2 * values.nbytes, "the input and the output"
        second = [asyncio.create_task(server.infer(body)) for _ in range(3)]
        await until(lambda: any(task.done() for task in second))
        refused = next(task for task in second if task.done()).result()
        expected = "limits.max_buffered_bytes: expected memory for the request, got all of it in use"
        assert error_of(refused, 503) == expected
        assert refused.headers["retry-after"] == "1"
        runner.gate.set()
        answers = [await first, *[await task for task in second]]
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503]
        assert server.arena.used_bytes == 0
        np.testing.assert_array_equal(file.floats(1024, HIDDEN, values.nbytes), values)


async def test_routing_in_regions() -> None:
    values, ids = rows(3), np.array([[0, 1], [1, 2], [2, 3]], np.int64)
    weights = np.full((3, TOP_K), 0.5, np.float32)
    tensors = {
        "hidden_states": ("FP32", [3, HIDDEN], values.tobytes()),
        "topk_ids": ("INT64", [3, TOP_K], ids.tobytes()),
        "topk_weights": ("FP32", [3, TOP_K], weights.tobytes()),
    }
    async with serving(enabled()) as server:
        expected = output_of(await server.infer(*binary_request(tensors)))
        with shm_file() as file:
            file.write(values.tobytes() + ids.tobytes() + weights.tobytes())
            await registered(server, "r", file.key, 4096)
            ids_at, weights_at = values.nbytes, values.nbytes + ids.nbytes
            inputs = (
                region_input("r", [3, HIDDEN], 0),
                region_input("r", [3, TOP_K], ids_at, "topk_ids", "INT64", ids.nbytes),
                region_input("r", [3, TOP_K], weights_at, "topk_weights"),
            )
            np.testing.assert_array_equal(output_of(await server.infer(json_request(*inputs))), expected)
            mixed = json_request(inputs[0], json_input(ids, "topk_ids", "INT64"), inputs[2])
            np.testing.assert_array_equal(output_of(await server.infer(mixed)), expected)
            file.write(np.array([NUM_EXPERTS + 1]), ids_at)
            text = error_of(await server.infer(json_request(*inputs)), 400)
            assert text == "topk_ids: expected 0 to 3, or for no expert -1 or 4, got 5 in token 0, slot 0"


class Validating(AddressRunner):
    """Lets the caller change its memory between validation and step."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change
        self.seen: list[bytes] = []

    def validate(self, request: LayerRequest) -> None:
        super().validate(request)
        self.change()

    def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
        self.seen += [bytes(request.topk_ids) for request in requests]  # type: ignore[arg-type]
        return super()._run(requests)


@pytest.mark.parametrize("on_device", [False, True])
async def test_routing_that_changes_after_its_validation_has_no_effect(on_device: bool) -> None:
    ids = np.array([[0, 1]], np.int32)
    with shm_file() as file:
        runner = Validating(lambda: file.write(np.array([[99, 99]], np.int32), ROW))
        loader = Device(runner).loader() if on_device else serving_runner(runner)
        async with serving(enabled(), loader) as server:
            file.write(rows(1).tobytes() + ids.tobytes() + np.ones((1, TOP_K), np.float32).tobytes())
            await registered(server, "r", file.key, 4096)
            inputs = (
                region_input("r", [1, HIDDEN], 0),
                region_input("r", [1, TOP_K], ROW, "topk_ids", "INT32"),
                region_input("r", [1, TOP_K], ROW + 8, "topk_weights"),
            )
            assert (await server.infer(json_request(*inputs))).status_code == 200
        assert file.read(8, ROW) == np.array([[99, 99]], np.int32).tobytes()
    assert runner.seen == [ids.tobytes()]


GPU_INPUTS = (
    region_input("gpu", [2, HIDDEN], 256),
    region_input("gpu", [2, TOP_K], 4096, "topk_ids", "INT32"),
    region_input("gpu", [2, TOP_K], 4112, "topk_weights"),
)


async def test_memory_of_a_gpu_is_used_in_place_and_its_routing_is_not_validated() -> None:
    device, values = Device(), rows(2)
    async with serving(enabled(), device.loader()) as server:
        await register_cuda(server, "gpu", 8192)
        routing = np.full((2, TOP_K), 99, np.int32)
        ctypes.memmove(device.address + 256, values.tobytes(), values.nbytes)
        ctypes.memmove(device.address + 4096, routing.tobytes(), routing.nbytes)
        output = region_output("gpu", values.nbytes, 6144)
        assert (await server.infer(json_request(*GPU_INPUTS, outputs=output))).status_code == 200
        np.testing.assert_array_equal(device.read(6144, values.nbytes).reshape(2, HIDDEN), 2 * values)
        hidden = GPU_INPUTS[0]
        np.testing.assert_array_equal(output_of(await server.infer(json_request(hidden))), 2 * values)
        ids = json_input(np.zeros((2, TOP_K), np.int32), "topk_ids", "INT32")
        weights = json_input(np.ones((2, TOP_K), np.float32), "topk_weights")
        both = "inputs topk_ids and topk_weights: expected both in CUDA memory or neither, got"
        for given, name in ((GPU_INPUTS[1], "topk_ids"), (GPU_INPUTS[2], "topk_weights")):
            body = json_request(hidden, given, weights if name == "topk_ids" else ids)
            assert error_of(await server.infer(body), 400) == f"{both} {name} alone"


async def test_the_masked_layout_needs_routing_on_the_host() -> None:
    settings = enabled()
    masked = settings.models[0].model_copy(update={"masked_max_tokens": 4})
    async with serving(settings.model_copy(update={"models": (masked,)}), Device().loader()) as server:
        await register_cuda(server, "gpu", 8192)
        text = error_of(await server.infer(json_request(*GPU_INPUTS)), 400)
        assert text == (
            "inputs topk_ids and topk_weights: expected host memory, because model tiny has "
            "masked_max_tokens, got CUDA memory"
        )
        assert (await server.infer(json_request(GPU_INPUTS[0]))).status_code == 200
        assert all(region.uses == 0 for region in server.app.engine.shared_memory.status("cuda"))


SIZE = 16384
GOOD = region_input("r", [2, HIDDEN], 0)


INPUT, OFFSET = (
    "input hidden_states: expected ",
    "parameter shared_memory_offset of input hidden_states: expected ",
)
OUTPUT = "output hidden_states: expected "
WITHIN = f"to lie within the {SIZE} bytes of region 'r', got 1024 bytes at "
APART = "memory apart from the inputs, got an overlap with input hidden_states"


def with_parameters(**parameters: Any) -> dict[str, Any]:
    """An input with these parameters alone."""
    return {**GOOD, "parameters": {f"shared_memory_{name}": value for name, value in parameters.items()}}


WRONG_INPUTS: list[tuple[dict[str, Any], str]] = [
    (region_input("x", [2, HIDDEN]), f"{INPUT}a registered region, got 'x'"),
    (region_input("r", [2, HIDDEN], SIZE - 512), f"{INPUT}{WITHIN}{SIZE - 512}"),
    (region_input("r", [2, HIDDEN], 8), f"{INPUT}to begin at a multiple of 16 bytes, got 8"),
    (region_input("r", [2, HIDDEN], -16), f"{OFFSET}a number of bytes, got -16"),
    (region_input("r", [2, HIDDEN], 2**63), f"{OFFSET}a number of bytes, got 92"),
    (
        region_input("r", [2, HIDDEN], size=1023),
        "shared_memory_byte_size of input hidden_states: expected 1024 for shape [2, 128] of FP32, got 1023",
    ),
    (
        with_parameters(region="r", byte_size=True),
        "parameter shared_memory_byte_size of input hidden_states: expected a number of bytes, got true",
    ),
    (
        with_parameters(region=["r"], byte_size=1024),
        "parameter shared_memory_region of input hidden_states: expected a name, got ['r']",
    ),
    (
        with_parameters(region="", byte_size=1024),
        "parameter shared_memory_region of input hidden_states: expected a name, got ''",
    ),
    (
        with_parameters(byte_size=1024),
        "parameters of input hidden_states: expected shared_memory_region too, "
        "got shared_memory_byte_size alone",
    ),
    ({**GOOD, "data": [0] * 256}, f"{INPUT}shared_memory_region alone, got data too"),
    (
        {**GOOD, "parameters": {**place("r", 1024), "binary_data_size": 1024}},
        f"{INPUT}shared_memory_region alone, got binary_data_size too",
    ),
]
WRONG_OUTPUTS = [
    (region_output("r", 1023, 4096), f"{OUTPUT}shared_memory_byte_size of at least 1024, got 1023"),
    (region_output("x", 1024), f"{OUTPUT}a registered region, got 'x'"),
    (region_output("r", 1024, SIZE - 16), f"{OUTPUT}{WITHIN}{SIZE - 16}"),
    (region_output("r", 1024, 0), f"{OUTPUT}{APART}"),
    (region_output("again", 1024, 0), f"{OUTPUT}{APART}"),
]


@pytest.mark.parametrize("on_device", [False, True])
async def test_wrong_places_are_refused(on_device: bool) -> None:
    wrong = [(json_request(given, id="7"), text) for given, text in WRONG_INPUTS]
    wrong += [(json_request(GOOD, outputs=outputs, id="7"), text) for outputs, text in WRONG_OUTPUTS]
    async with (
        serving(enabled(), Device().loader() if on_device else load) as server,
        region(server, SIZE) as file,
    ):
        await registered(server, "again", file.key, SIZE - 512, 512)
        for count, (body, expected) in enumerate(wrong, 1):
            text = error_of(await server.infer(body), 400)
            assert text.startswith(expected)
            assert text.endswith("(request id: 7)")
            assert server.metric("refusals_total", model="tiny", reason="invalid_request") == count
            assert all(region.uses == 0 for region in server.app.engine.shared_memory.status("system"))
        body = json_request(GOOD, outputs=region_output("r", 1024, 4096))
        assert (await server.infer(body)).status_code == 200
        body = json_request(json_input(rows(1)), parameters=place("r", 1))
        text = error_of(await server.infer(body), 400)
        expected = "parameter shared_memory_region of the request: expected it at a tensor, got 'r' here"
        assert text == expected


@pytest.mark.parametrize("on_device", [False, True])
async def test_a_file_that_shrank_is_refused_and_usable_again_when_registered_anew(on_device: bool) -> None:
    device = Device()
    async with (
        serving(enabled(), device.loader() if on_device else load) as server,
        region(server, SIZE) as file,
    ):
        os.ftruncate(file.fd, 4096)
        body = json_request(region_input("r", [2, HIDDEN], 4096), id="7")
        text = error_of(await server.infer(body), 400)
        expected = "input hidden_states: expected a file of at least 5120 bytes, got one that was shrunk"
        assert text == f"{expected} to 4096 (request id: 7)"
        body = json_request(GOOD, outputs=region_output("r", 1024, 3584))
        text = error_of(await server.infer(body), 400)
        expected = "output hidden_states: expected a file of at least 4608 bytes, got one that was shrunk"
        assert text == f"{expected} to 4096"
        assert os.fstat(file.fd).st_size == 4096
        await server.http.post(f"{SYSTEM}/region/r/unregister")
        os.ftruncate(file.fd, SIZE)
        await registered(server, "r", file.key, SIZE)
        assert (await server.infer(json_request(GOOD))).status_code == 200
        assert all(region.uses == 0 for region in server.app.engine.shared_memory.status("system"))
