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
    async with serving(enabled(), Device().loader() if on_device else load) as server:
        with shm_file(SIZE) as file:
            await registered(server, "r", file.key, SIZE)
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
