"""/v1/profile on a CPU: the steps that it records, and what it refuses."""

import asyncio
import json
import socket
import struct
import time

import pytest

from expertd.service.engine import recorder
from tests.service.apps import Serving, error_of, hidden_request, output_of, rows, serving, tiny_settings
from tests.service.sockets import connect, head, listening

LANES = {"decode_max_tokens": 2, "decode_batch_tokens": 4}


async def load(server: Serving, end: asyncio.Event) -> None:
    while not end.is_set():
        for num_tokens in (1, 8):
            output_of(await server.infer(*hidden_request(rows(num_tokens))))


@pytest.mark.parametrize("lanes", [{}, LANES])
async def test_steps_are_recorded_while_requests_are_answered(lanes: dict[str, int]) -> None:
    async with serving(tiny_settings(lanes=lanes)) as server:
        end = asyncio.Event()
        loading = asyncio.ensure_future(load(server, end))
        response = await server.http.post("/v1/profile", json={"steps": 10, "seconds": 20}, timeout=60)
        end.set()
        await loading
    assert response.status_code == 200
    trace = json.loads(response.content)
    assert trace["expertd"]["steps"] >= 10
    assert trace["expertd"]["backend"] == "reference"
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert len(names) > 10
    assert any(name.startswith("aten::") for name in names)


async def test_a_recording_ends_without_steps() -> None:
    async with serving(tiny_settings()) as server:
        begin = time.monotonic()
        response = await server.http.post("/v1/profile", json={"seconds": 0.2}, timeout=60)
        assert 0.2 <= time.monotonic() - begin < 20
    assert json.loads(response.content)["expertd"]["steps"] == 0


async def test_it_ends_when_the_server_shuts_down() -> None:
    async with serving(tiny_settings()) as server:
        asked = asyncio.ensure_future(server.http.post("/v1/profile", timeout=60))
        await asyncio.sleep(0.2)
        server.app.engine.begin_drain()
        assert error_of(await asyncio.wait_for(asked, 5), 503).startswith("the server is shutting down")
        assert await server.app.engine.drain()


async def test_it_ends_when_the_caller_hangs_up() -> None:
    async with serving(tiny_settings()) as server, listening(server) as port:
        with connect(port) as caller:
            caller.sendall(head("POST /v1/profile HTTP/1.1", "Content-Length: 0"))
            await asyncio.sleep(0.2)
            error_of(await server.http.post("/v1/profile", json={}), 409)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with asyncio.timeout(5):
            while (await server.http.post("/v1/profile", json={"seconds": 0.1})).status_code != 200:
                await asyncio.sleep(0.1)


async def test_one_at_a_time() -> None:
    async with serving(tiny_settings()) as server:
        first = asyncio.ensure_future(server.http.post("/v1/profile", json={"seconds": 1}, timeout=60))
        await asyncio.sleep(0.1)
        text = error_of(await server.http.post("/v1/profile", json={}), 409)
        assert text == "profile: expected none to be recorded, got one that is"
        assert (await first).status_code == 200
        assert (await server.http.post("/v1/profile", json={"seconds": 0.1})).status_code == 200


async def test_a_large_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_BYTES", 100)
    async with serving(tiny_settings()) as server:
        text = error_of(await server.http.post("/v1/profile", json={"seconds": 0.1}, timeout=60), 422)
    assert text.startswith("profile: expected a trace of at most 100 bytes, got ")


@pytest.mark.parametrize("body", [{"steps": 0}, {"steps": 257}, {"seconds": 0}, {"seconds": 61}, {"more": 1}])
async def test_what_is_out_of_bounds_is_refused(body: dict[str, int]) -> None:
    async with serving(tiny_settings()) as server:
        error_of(await server.http.post("/v1/profile", json=body), 422)
