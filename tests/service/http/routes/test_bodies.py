"""Which status a field that is missing, unknown or of a wrong type has, as docs/http.md says by call."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.service.apps import serving, tiny_settings

CHANNEL = {"version": 3, "model": "tiny", "num_slots": 2, "max_tokens": 4, "memory": "system"}
REGION = "/v2/systemsharedmemory/region/r/register"
CUDA_REGION = REGION.replace("system", "cuda")
UNKNOWN = {"unknown": 1}


async def test_wrong_fields_have_the_documented_statuses(tmp_path: Path) -> None:
    cases: list[tuple[str, str, dict[str, Any], int]] = [
        ("POST", "/v1/channels", {"model": "tiny"}, 400),
        ("POST", "/v1/channels", {**CHANNEL, "num_slots": "2"}, 400),
        ("POST", "/v1/channels", {**CHANNEL, **UNKNOWN}, 400),
        ("POST", REGION, {"key": "/r"}, 400),
        ("POST", REGION, {"key": "/r", "offset": 0, "byte_size": "5"}, 400),
        ("POST", "/v2/repository/index", {"ready": "x"}, 400),
        ("POST", "/v2/repository/index", UNKNOWN, 200),
        ("POST", "/v2/repository/models/tiny/load", {"parameters": 5}, 400),
        ("POST", "/v2/repository/models/tiny/load", UNKNOWN, 200),
        ("PUT", "/v1/log", {"level": 1}, 422),
        ("PUT", "/v1/log", {"level": "info", **UNKNOWN}, 422),
        ("PUT", "/v1/partitions", {"partitions": {"p": "8"}}, 422),
        ("POST", "/v1/profile", UNKNOWN, 422),
    ]
    settings = tiny_settings(shared_memory={"enabled": True}, channels={"socket": tmp_path / "channels"})
    async with serving(settings) as server:
        found = [
            (await server.http.request(way, path, json=body)).status_code for way, path, body, _ in cases
        ]
    assert found == [status for *_, status in cases]


async def test_null_is_absent_in_every_call(tmp_path: Path) -> None:
    """Also of names in an object, and of a whole body; a field that is required is missing then."""
    system = {"system": {"byte_size": 100_000}}
    handle = {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 1}
    rows: list[tuple[str, str, Any, Any]] = [
        ("POST", "/v2/repository/index", {"ready": None}, {}),
        ("POST", "/v2/repository/index", None, {}),
        ("POST", "/v2/repository/models/tiny/load", {"parameters": None}, {}),
        ("POST", "/v2/repository/models/tiny/load", {"parameters": {"config": None}}, {}),
        ("POST", "/v2/repository/models/tiny/load", None, {}),
        ("POST", "/v2/repository/models/tiny/unload", {"parameters": {"unload_dependents": None}}, {}),
        ("POST", "/v2/repository/models/tiny/load", {"parameters": {"unload_dependents": None}}, {}),
        ("POST", REGION, {"key": "/r", "byte_size": 5, "offset": None}, {"key": "/r", "byte_size": 5}),
        ("POST", REGION, {"key": None, "byte_size": 5}, {"byte_size": 5}),
        ("POST", REGION, None, {}),
        ("POST", CUDA_REGION, {**handle, "raw_handle": {"b64": None}}, {**handle, "raw_handle": {}}),
        ("POST", "/v1/channels", {**CHANNEL, "memory": None, "unknown": None, "datatype": None}, CHANNEL),
        (
            "POST",
            "/v1/channels",
            {**CHANNEL, "memory": {**system, "cuda": None}},
            {**CHANNEL, "memory": system},
        ),
        (
            "POST",
            "/v1/channels",
            {**CHANNEL, "model": None, "models": None},
            {"version": 3, "num_slots": 2, "max_tokens": 4},
        ),
        (
            "POST",
            "/v1/channels",
            {**CHANNEL, "num_slots": None},
            {"version": 3, "model": "tiny", "max_tokens": 4},
        ),
        ("PUT", "/v1/log", {"level": None}, {}),
        ("PUT", "/v1/log", {"level": "warning", "unknown": None}, {"level": "warning"}),
        ("PUT", "/v1/partitions", {"partitions": {"p": None}}, {"partitions": {}}),
        ("PUT", "/v1/partitions", {"partitions": None}, {}),
        ("POST", "/v1/placement", {"action": "rebalance", "ranks": None}, {"action": "rebalance"}),
        ("POST", "/v1/placement", {"action": None}, {}),
        ("POST", "/v1/profile", {"steps": "1", "seconds": None}, {"steps": "1"}),
        ("POST", "/v1/profile", {"steps": None, "seconds": 0.01}, {"seconds": 0.01}),
    ]
    settings = tiny_settings(shared_memory={"enabled": True}, channels={"socket": tmp_path / "channels"})

    def compared(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.text if answer.status_code >= 400 else ""

    async with serving(settings) as server:
        for way, path, nulls, absent in rows:
            with_nulls, without = [
                await server.http.request(way, path, content=json.dumps(body)) for body in (nulls, absent)
            ]
            assert compared(with_nulls) == compared(without), (path, nulls)
