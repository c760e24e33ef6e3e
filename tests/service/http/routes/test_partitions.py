"""/v1/partitions with a fake device; the real one is tested on a GPU."""

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest

from expertd.service.engine.layers import LoadCancelledError
from tests.service.apps import (
    MODEL,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.waiting import until

TOTAL, GRANULARITY = 132, 8


@dataclass(frozen=True)
class Share:
    name: str
    requested_sms: int
    num_sms: int


class Device:
    """Grants SMs in multiples of 8, or changes nothing."""

    device_name = "arithmetic"
    total_sms = TOTAL
    granularity = GRANULARITY

    def __init__(self) -> None:
        self.partitions: tuple[Share, ...] = ()

    def apply(self, sizes: Mapping[str, int]) -> tuple[Share, ...]:
        shares = tuple(Share(name, sms, -(-sms // GRANULARITY) * GRANULARITY) for name, sms in sizes.items())
        needed = sum(share.num_sms for share in shares)
        if needed > TOTAL:
            raise ValueError(f"partitions: expected at most {TOTAL} SMs, got {needed}")
        self.partitions = shares
        return shares


async def test_all_partitions_are_replaced_at_once() -> None:
    async with serving(tiny_settings(), serving_runner(EchoRunner(), Device())) as server:
        empty = {"device": "arithmetic", "total_sms": 132, "granularity": 8, "partitions": {}}
        assert (await server.http.get("/v1/partitions")).json() == empty
        response = await server.http.put(
            "/v1/partitions", json={"partitions": {"compute": 100, "communication": 20}}
        )
        assert response.status_code == 200
        expected = {
            "compute": {"requested_sms": 100, "num_sms": 104},
            "communication": {"requested_sms": 20, "num_sms": 24},
        }
        assert response.json()["partitions"] == expected
        assert (await server.http.get("/v1/partitions")).json()["partitions"] == expected
        assert server.metric("partition_sms", partition="compute") == 104
        assert server.metric("device_sms") == 132

        refused = await server.http.put("/v1/partitions", json={"partitions": {"compute": 130, "other": 8}})
        assert error_of(refused, 422) == "partitions: expected at most 132 SMs, got 144"
        assert (await server.http.get("/v1/partitions")).json()["partitions"] == expected, "nothing changed"
        assert (await server.http.put("/v1/partitions", json={"partitions": {}})).json() == empty


MANY = json.dumps({"partitions": dict.fromkeys(map(str, range(40)), 8)}).encode()
WRONG = [
    (b"", 400, "body: expected JSON"),
    (b"{", 400, "body: expected JSON"),
    (b"[]", 422, "body: "),
    (b"{}", 422, "partitions: expected a value, got none"),
    (b'{"partitions": {"a": 0}}', 422, "partitions.a: expected a number greater than 0, got 0"),
    (b'{"partitions": {"a": "8"}}', 422, "partitions.a: expected a valid integer, got '8'"),
    (b'{"partitions": {"a": true}}', 422, "partitions.a: expected a valid integer, got true"),
    (b'{"partitions": {}, "x": 1}', 422, "x: expected no such key, got 1"),
    (MANY, 422, "partitions: expected at most 32 entries, got at least 33"),
]


async def test_invalid_bodies_are_refused() -> None:
    async with serving(tiny_settings(), serving_runner(EchoRunner(), Device())) as server:
        for body, status, expected in WRONG:
            assert expected in error_of(await server.http.put("/v1/partitions", content=body), status)


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/partitions"), ("POST", "/v2/repository/index")])
async def test_compressed_and_long_bodies_are_refused(method: str, path: str) -> None:
    async with serving(tiny_settings(), serving_runner(EchoRunner(), Device())) as server:
        headers = {"content-encoding": "gzip"}
        response = await server.http.request(method, path, content=b"{}", headers=headers)
        assert error_of(response, 415) == "Content-Encoding: expected none for this call, got 'gzip'"
        response = await server.http.request(method, path, content=bytes(64 * 1024 + 1))
        assert error_of(response, 413) == "body: expected at most 65536 bytes, got at least 65537"
        fits = b'{"partitions": {}}' if method == "PUT" else b"{}"
        response = await server.http.request(method, path, content=fits.ljust(64 * 1024))
        assert response.status_code == 200


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/partitions"), ("POST", "/v2/repository/index")])
async def test_a_body_is_not_read_beyond_the_limit(method: str, path: str) -> None:
    chunks_read = 0

    async def receive() -> dict[str, object]:
        nonlocal chunks_read
        chunks_read += 1
        return {"type": "http.request", "body": bytes(40_000), "more_body": True}

    async def status(*headers: tuple[bytes, bytes]) -> int:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        await server.app(scope, receive, send)
        return int(sent[0]["status"])

    async with serving(tiny_settings(), serving_runner(EchoRunner(), Device())) as server:
        assert await status((b"content-length", b"60000000")) == 413
        assert chunks_read == 0
        assert await status() == 413
        assert chunks_read == 2
        assert await status((b"content-length", b"1"), (b"content-length", b"2")) == 400


async def test_a_partition_in_use_cannot_be_taken_away() -> None:
    settings = tiny_settings(models=[{**MODEL, "partition": "compute"}], partitions={"compute": 64})
    async with serving(settings, serving_runner(EchoRunner(), Device())) as server:
        refused = await server.http.put("/v1/partitions", json={"partitions": {"other": 8}})
        assert error_of(refused, 422) == (
            "partitions: expected 'compute', in which model tiny runs, among them, got other"
        )


async def test_a_change_waits_for_the_current_step_and_drops_no_request() -> None:
    runner, device = EchoRunner(), Device()
    async with serving(tiny_settings(), serving_runner(runner, device)) as server:
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        await runner.begun()
        waiting = [asyncio.ensure_future(server.infer(*hidden_request(rows(1)))) for _ in range(4)]
        change = asyncio.ensure_future(server.http.put("/v1/partitions", json={"partitions": {"a": 8}}))
        await until(lambda: server.metric("queue_requests", model="tiny") >= 4)
        assert device.partitions == ()
        runner.gate.set()
        assert (await change).status_code == 200
        for response in await asyncio.gather(first, *waiting):
            output_of(response)
    assert runner.steps == [[1], [1, 1, 1, 1]]


@pytest.mark.parametrize("failure", [RuntimeError, ValueError, LoadCancelledError, Exception])
async def test_graphs_are_recaptured_between_a_change_and_the_next_step(failure: type[Exception]) -> None:
    device, seen = Device(), []

    def prepare() -> None:
        seen.append((device.partitions[0].num_sms, len(runner.steps)))
        if len(seen) == 2:
            raise failure("no memory for graphs")

    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner, device, prepare)) as server:
        for sizes in ({"a": 8}, {"a": 16}, {"a": 900}):
            response = await server.http.put("/v1/partitions", json={"partitions": sizes})
            assert response.status_code == (200 if sizes["a"] < TOTAL else 422)
            output_of(await server.infer(*hidden_request(rows(1))))
    assert seen == [(8, 0), (16, 1)], (
        "a failed recapture keeps the new partitions; a refused request changes nothing"
    )
