"""Which status a field that is missing, unknown or of a wrong type has, as docs/http.md says by call."""

from pathlib import Path
from typing import Any

from tests.service.apps import serving, tiny_settings

CHANNEL = {"model": "tiny", "num_slots": 2, "max_tokens": 4, "memory": "system"}
REGION = "/v2/systemsharedmemory/region/r/register"
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


async def test_a_region_may_have_unknown_fields() -> None:
    settings = tiny_settings(shared_memory={"enabled": True})
    async with serving(settings) as server:
        body = {"key": "/expertd-no-such", "offset": 0, "byte_size": 5, **UNKNOWN}
        text = (await server.http.post(REGION, json=body)).json()["error"]
    assert text.startswith("key: expected a file in /dev/shm")
