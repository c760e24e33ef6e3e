"""Requests that name shared memory wrongly, or memory that is gone."""

import os
from typing import Any

import pytest

from expertd.service.engine.loading import load
from tests.service.apps import (
    HIDDEN,
    error_of,
    json_input,
    json_request,
    rows,
    serving,
)
from tests.service.regions import (
    SYSTEM,
    Device,
    enabled,
    place,
    region_input,
    region_output,
    registered,
)
from tests.service.shm import shm_file

SIZE = 16384
GOOD = region_input("r", [2, HIDDEN], 0)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("given", "outputs", "expected"),
    [
        (region_input("x", [2, HIDDEN]), [], "input hidden_states: expected a registered region, got 'x'"),
        (
            region_input("r", [2, HIDDEN], SIZE - 512),
            [],
            f"input hidden_states: expected to lie within the {SIZE} bytes of region 'r', "
            f"got 1024 bytes at {SIZE - 512}",
        ),
        (
            region_input("r", [2, HIDDEN], 8),
            [],
            "input hidden_states: expected to begin at a multiple of 16 bytes, got 8",
        ),
        (
            region_input("r", [2, HIDDEN], -16),
            [],
            "parameter shared_memory_offset of input hidden_states: expected a number of bytes, got -16",
        ),
        (
            region_input("r", [2, HIDDEN], 2**63),
            [],
            "parameter shared_memory_offset of input hidden_states: expected a number of bytes, got 92",
        ),
        (
            region_input("r", [2, HIDDEN], size=1023),
            [],
            "shared_memory_byte_size of input hidden_states: expected 1024 for shape [2, 128] of FP32, "
            "got 1023",
        ),
        (
            {**GOOD, "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": True}},
            [],
            "parameter shared_memory_byte_size of input hidden_states: expected a number of bytes, got true",
        ),
        (
            {**GOOD, "parameters": {"shared_memory_region": ["r"], "shared_memory_byte_size": 1024}},
            [],
            "parameter shared_memory_region of input hidden_states: expected a name, got ['r']",
        ),
        (
            {**GOOD, "parameters": {"shared_memory_region": "", "shared_memory_byte_size": 1024}},
            [],
            "parameter shared_memory_region of input hidden_states: expected a name, got ''",
        ),
        (
            {**GOOD, "parameters": {"shared_memory_byte_size": 1024}},
            [],
            "parameters of input hidden_states: expected shared_memory_region too, "
            "got shared_memory_byte_size alone",
        ),
        (
            {**GOOD, "data": [0] * 256},
            [],
            "input hidden_states: expected shared_memory_region alone, got data too",
        ),
        (
            {**GOOD, "parameters": {**place("r", 1024), "binary_data_size": 1024}},
            [],
            "input hidden_states: expected shared_memory_region alone, got binary_data_size too",
        ),
        (
            GOOD,
            region_output("r", 1023, 4096),
            "output hidden_states: expected shared_memory_byte_size of at least 1024, got 1023",
        ),
        (
            GOOD,
            region_output("x", 1024),
            "output hidden_states: expected a registered region, got 'x'",
        ),
        (
            GOOD,
            region_output("r", 1024, SIZE - 16),
            f"output hidden_states: expected to lie within the {SIZE} bytes of region 'r', "
            f"got 1024 bytes at {SIZE - 16}",
        ),
        (
            GOOD,
            region_output("r", 1024, 0),
            "output hidden_states: expected memory apart from the inputs, "
            "got an overlap with input hidden_states",
        ),
        (
            GOOD,
            region_output("again", 1024, 0),
            "output hidden_states: expected memory apart from the inputs, "
            "got an overlap with input hidden_states",
        ),
    ],
)
async def test_wrong_places_are_refused(
    on_device: bool, given: dict[str, Any], outputs: list[dict[str, Any]], expected: str
) -> None:
    async with serving(enabled(), Device().loader() if on_device else load) as server:
        with shm_file(SIZE) as file:
            await registered(server, "r", file.key, SIZE)
            await registered(server, "again", file.key, SIZE - 512, 512)
            text = error_of(await server.infer(json_request(given, outputs=outputs, id="7")), 400)
            assert text.startswith(expected)
            assert text.endswith("(request id: 7)")
            assert server.metric("refusals_total", model="tiny", reason="invalid_request") == 1
            assert all(region.uses == 0 for region in server.app.engine.shared_memory.status("system"))
            body = json_request(GOOD, outputs=region_output("r", 1024, 4096))
            assert (await server.infer(body)).status_code == 200


async def test_a_region_belongs_to_a_tensor() -> None:
    async with serving(enabled()) as server:
        body = json_request(json_input(rows(1)), parameters=place("r", 1))
        text = error_of(await server.infer(body), 400)
    assert text == "parameter shared_memory_region of the request: expected it at a tensor, got 'r' here"


@pytest.mark.parametrize("on_device", [False, True])
async def test_a_file_that_shrank_is_refused_and_usable_again_when_registered_anew(on_device: bool) -> None:
    device = Device()
    async with serving(enabled(), device.loader() if on_device else load) as server:
        with shm_file(SIZE) as file:
            await registered(server, "r", file.key, SIZE)
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
