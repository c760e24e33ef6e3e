"""The calls that register shared memory, and what they refuse."""

from typing import Any

from tests.service.apps import HIDDEN, error_of, json_request, serving, tiny_settings
from tests.service.regions import (
    CUDA,
    HANDLE,
    SYSTEM,
    Device,
    enabled,
    region_input,
    register,
    register_cuda,
    registered,
    totals,
)
from tests.service.shm import shm_file


async def test_register_status_and_unregister() -> None:
    async with serving(enabled()) as server:
        with shm_file() as file:
            await registered(server, "one", f"/{file.key}", 4096, 4096)
            assert (await register(server, "two", file.key, 100)).status_code == 200
            one = {"name": "one", "key": f"/{file.key}", "offset": 4096, "byte_size": 4096}
            two = {"name": "two", "key": file.key, "offset": 0, "byte_size": 100}
            assert (await server.http.get(f"{SYSTEM}/status")).json() == [one, two]
            assert (await server.http.get(f"{SYSTEM}/region/two/status")).json() == [two]
            assert (await server.http.get(f"{CUDA}/status")).json() == []
            assert totals(server) == (2, 4196)
            gone = await server.http.post(f"{SYSTEM}/region/one/unregister")
            assert (gone.status_code, gone.content) == (200, b"")
            text = error_of(await server.http.get(f"{SYSTEM}/region/one/status"), 404)
            assert text == "name: expected a registered system region, got 'one'"
            assert totals(server) == (1, 100)
            assert (await server.http.post(f"{SYSTEM}/unregister")).status_code == 200
            assert (await server.http.get(f"{SYSTEM}/status")).json() == []
            assert totals(server) == (0, 0)
            for path in (f"{SYSTEM}/region/one/unregister", f"{CUDA}/unregister"):
                assert (await server.http.post(path)).status_code == 200, "as Triton: no error"


async def test_unregistering_one_kind_leaves_the_other() -> None:
    device = Device()
    async with serving(enabled(), device.loader()) as server:
        with shm_file() as file:
            await registered(server, "host", file.key, 4096)
            assert (await register_cuda(server, "gpu", 4096, device_id=3)).status_code == 200
            assert device.opened == [(HANDLE, 4096)]
            expected = [{"name": "gpu", "device_id": 3, "byte_size": 4096}]
            assert (await server.http.get(f"{CUDA}/status")).json() == expected
            assert (await server.http.get(f"{CUDA}/region/gpu/status")).json() == expected
            error_of(await server.http.get(f"{SYSTEM}/region/gpu/status"), 404)
            assert (await server.http.post(f"{SYSTEM}/region/gpu/unregister")).status_code == 200
            assert totals(server, "cuda") == (1, 4096)
            assert len(device.registered) == 1
            await server.http.post(f"{SYSTEM}/unregister")
            assert device.registered == {}
            assert (totals(server), totals(server, "cuda")) == ((0, 0), (1, 4096))
            assert (await register(server, "gpu", file.key, 1)).status_code == 400, "one namespace"
            await server.http.post(f"{CUDA}/unregister")
            assert device.closed == 1


async def test_shared_memory_is_off_unless_a_setting_allows_it() -> None:
    expected = "shared memory: expected shared_memory.enabled to be true in the server's settings, got false"
    async with serving(tiny_settings()) as server:
        with shm_file() as file:
            assert error_of(await register(server, "a", file.key, 1), 403) == expected
        assert error_of(await register_cuda(server, "a", 1), 403) == expected
        for base in (SYSTEM, CUDA):
            for path in (f"{base}/status", f"{base}/region/a/status"):
                assert error_of(await server.http.get(path), 403) == expected
            for path in (f"{base}/unregister", f"{base}/region/a/unregister"):
                assert error_of(await server.http.post(path), 403) == expected
        text = error_of(await server.infer(json_request(region_input("a", [1, HIDDEN]))), 400)
        assert text == (
            "parameter shared_memory_region of input hidden_states: expected none, got 'a' while the setting "
            "shared_memory.enabled is false"
        )
        extensions = (await server.http.get("/v2")).json()["extensions"]
        assert [name for name in extensions if "shared_memory" in name] == []


async def test_cuda_memory_is_there_with_a_gpu() -> None:
    async with serving(enabled()) as server:
        assert (await server.http.get("/v2")).json()["extensions"][-1] == "system_shared_memory"
        text = error_of(await register_cuda(server, "a", 1), 400)
    assert text.startswith("cuda shared memory: expected a GPU, or several of one node, got backend ")
    async with serving(enabled(), Device().loader()) as server:
        extensions = (await server.http.get("/v2")).json()["extensions"]
    assert extensions[-2:] == ["system_shared_memory", "cuda_shared_memory"]


WRONG = [
    (b"", "body: expected JSON, got invalid JSON: "),
    (b"[]", "body: expected a"),
    (b'{"offset": 0, "byte_size": 1}', "key: expected a value, got none"),
    (b'{"key": 1, "byte_size": 1}', "key: expected a valid string, got 1"),
    (b'{"key": "x"}', "byte_size: expected a value, got none"),
    (b'{"key": "x", "byte_size": 0}', "byte_size: expected a number greater than or equal to 1, got 0"),
    (b'{"key": "x", "byte_size": true}', "byte_size: expected a valid integer, got true"),
    (b'{"key": "x", "byte_size": 1, "offset": -1}', "offset: expected a number greater than or equal"),
    (b'{"key": "../x", "byte_size": 1}', "key: expected the name of a file in /dev/shm, got '../x'"),
    (b'{"key": "\\ud800", "byte_size": 1}', "key: expected a valid string, got '\\ud800'"),
    (b'{"key": "expertd-none", "byte_size": 1}', "key: expected a file in /dev/shm that the server may"),
    (b'{"key": "expertd-none", "byte_size": 1, "unknown": 1}', "key: expected a file in /dev/shm that"),
]
WRONG_HANDLES: list[tuple[dict[str, Any], str]] = [
    ({"raw_handle": "x"}, "raw_handle: expected "),
    ({"raw_handle": {}}, "raw_handle.b64: expected a value, got none"),
    ({"raw_handle": {"b64": "?"}}, "raw_handle.b64: expected base64, got another text: "),
    ({"raw_handle": {"b64": "\u00e9"}}, "raw_handle.b64: expected base64, got another text: "),
    ({"raw_handle": {"b64": "AAAA"}}, "raw_handle: expected a handle of another process's memory, got"),
    ({"device_id": -1}, "device_id: expected a number greater than or equal to 0, got -1"),
    ({"byte_size": 0}, "byte_size: expected a number greater than or equal to 1, got 0"),
]


async def test_invalid_registrations_are_refused() -> None:
    async with serving(enabled(), Device().loader()) as server:
        for body, expected in WRONG:
            text = error_of(await server.http.post(f"{SYSTEM}/region/a/register", content=body), 400)
            assert text.startswith(expected)
            assert ", got " in text
        for changes, expected in WRONG_HANDLES:
            assert error_of(await register_cuda(server, "a", 1, **changes), 400).startswith(expected)
        assert totals(server) == totals(server, "cuda") == (0, 0)


async def test_names_keys_numbers_and_bytes_are_bounded() -> None:
    async with serving(enabled(key_prefix="expertd-", max_regions=2, max_bytes=8192)) as server:
        with shm_file() as file:
            text = error_of(await register(server, "a", "/psm_1", 1), 400)
            expected = "a name that begins with shared_memory.key_prefix ('expertd-')"
            assert text == f"key: expected {expected}, got '/psm_1'"
            text = error_of(await register(server, "a" * 257, file.key, 1), 400)
            assert text == "name: expected at most 256 characters, got 257"
            await registered(server, "a", file.key, 8191)
            taken = error_of(await register(server, "a", file.key, 1), 400)
            assert taken.startswith("name: expected one that")
            large = error_of(await register(server, "b", file.key, 2), 400)
            assert large.startswith("byte_size: expected at")
            await registered(server, "b", file.key, 1)
            third = error_of(await register(server, "c", file.key, 1), 400)
            assert third.startswith("region: expected at most")
            await server.http.post(f"{SYSTEM}/region/a/unregister")
            await registered(server, "c", file.key, 8191)
