"""The log as JSON: one line for each request, with its ids, times, and the reason if it was refused."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import grpc
import httpx
import pytest

from expertd.service.settings.model import Settings
from tests.service.apps import HIDDEN, hidden_request, json_request, rows, tiny_settings
from tests.service.channels.peer import Peer
from tests.service.channels.test_processes import opened
from tests.service.forking import import_first
from tests.service.grpc.calls import ON, hidden_message
from tests.service.http.processes import two_processes
from tests.service.processes import ServerProcess, grpc_address, server_process
from tests.service.regions import SYSTEM, region_input
from tests.service.shm import shm_file
from tests.service.waiting import wait_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
QUEUED = {"queue_seconds", "compute_seconds"}

pytestmark = pytest.mark.slow


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log().splitlines()]


def infers(server: ServerProcess) -> list[dict[str, Any]]:
    return [line for line in lines(server) if line["message"].startswith("infer ")]


def infer(server: ServerProcess, content: bytes, length: int | None = None, **headers: str) -> int:
    if length is not None:
        headers["Inference-Header-Content-Length"] = str(length)
    url = f"http://{server.url}/v2/models/tiny/infer"
    return httpx.post(url, content=content, headers=headers, timeout=60).status_code


@pytest.fixture(scope="module", params=["one process", "several"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One for all tests, of which the last changes its level."""
    import_first("torch.profiler", "torch._inductor.config")  # seconds, which each process would need
    directory = tmp_path_factory.mktemp("server")
    on: dict[str, Any] = {
        "access_log": True,
        "log_format": "json",
        "shared_memory": {"enabled": True},
        "channels": {"socket": str(directory / "channels")},
        **ON,
    }
    settings: Settings = tiny_settings(**on) if request.param == "one process" else two_processes(**on)
    with server_process(settings, directory) as running:
        yield running


def test_each_request_is_one_line(server: ServerProcess) -> None:
    before = datetime.now(UTC)
    assert infer(server, *hidden_request(rows(3), id="mine"), traceparent=f"00-{TRACE}-{SPAN}-01") == 200
    assert infer(server, *hidden_request(rows(65), id="large")) == 400
    wait_for(lambda: len(infers(server)) == 2, "both lines")
    good, bad = infers(server)
    assert before.timestamp() - 1 < datetime.fromisoformat(good["time"]).timestamp() < before.timestamp() + 60
    assert good["time"].endswith("Z")
    of = {"model": "tiny", "status": 200, "request_id": "mine", "tokens": 3, "level": "info"}
    assert {name: good[name] for name in of} == of
    assert (good["trace_id"], good["parent_span_id"]) == (TRACE, SPAN)
    assert good["seconds"] > 0
    assert "reason" not in good
    assert (bad["status"], bad["reason"], bad["request_id"]) == (400, "too_many_tokens", "large")
    assert "65" in bad["error"]
    assert "trace_id" not in bad
    assert not any("infer HTTP" in line["message"] for line in lines(server)), "no other line for them"


def test_other_calls_are_lines_with_fields(server: ServerProcess) -> None:
    server.get("/v2/models/tiny?key=secret")
    found = [line for line in lines(server) if line.get("path") == "/v2/models/tiny"]
    assert [(line["method"], line["status"], line["key"]) for line in found] == [("GET", 200, "-")]
    assert not any("secret" in str(line) for line in lines(server))


def test_a_request_is_one_line_however_it_comes(server: ServerProcess) -> None:
    """Over HTTP (3 tokens), in a region (4), over gRPC (5), and in a channel (6)."""
    before = len(infers(server))
    assert infer(server, *hidden_request(rows(3))) == 200
    with shm_file() as file:
        url = f"http://{server.url}{SYSTEM}/region/here/register"
        assert httpx.post(url, json={"key": file.key, "byte_size": 4096}, timeout=60).status_code == 200
        assert infer(server, json_request(region_input("here", [4, HIDDEN]))) == 200
    with grpc.insecure_channel(grpc_address(server)) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        call(hidden_message(rows(5)).SerializeToString(), timeout=60)
    peer = Peer(opened(server))
    assert peer.wait(peer.send(6, peer.places(1))).status == 200
    peer.close()
    wait_for(lambda: len(infers(server)) >= before + 4, "the lines of four requests")
    server.get("/v2/models/tiny/config")
    found = sorted(infers(server)[before:], key=lambda line: int(line["tokens"]))
    assert [line["tokens"] for line in found] == [3, 4, 5, 6]
    for line in found[:3]:
        assert {"receive_seconds", *QUEUED} <= line.keys(), line
        stages = line["receive_seconds"] + line["queue_seconds"] + line["compute_seconds"]
        assert stages <= line["seconds"] + 1e-5  # each is rounded
    assert found[3].keys() >= QUEUED
    others = [line for line in lines(server) if line.get("path") == "/v2/models/tiny/config"]
    assert len(others) == 1, "the process that answered it"


def recorded(server: ServerProcess) -> int:
    """The steps in a profile that is asked for while requests come."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            httpx.post, f"http://{server.url}/v1/profile", json={"steps": 1, "seconds": 20}, timeout=60
        )
        while not asked.done():
            assert infer(server, *hidden_request(rows(1))) == 200
        return int(asked.result().json()["expertd"]["steps"])


def test_every_line_is_json_after_a_profile(server: ServerProcess) -> None:
    """Torch's profiler writes lines of its own by default."""
    assert recorded(server) > 0
    assert lines(server)


def test_the_level_changes_at_run_time(server: ServerProcess) -> None:
    url = f"http://{server.url}/v1/log"
    assert httpx.get(url, timeout=60).json() == {"level": "info"}
    infer(server, b"{")
    assert not [line for line in lines(server) if line["level"] == "debug"]
    assert httpx.put(url, json={"level": "debug"}, timeout=60).json() == {"level": "debug"}
    wait_for(
        lambda: infer(server, b"{") and [line for line in lines(server) if line["level"] == "debug"],
        "lines of refusals",
    )
    assert httpx.put(url, json={"level": "error"}, timeout=60).status_code == 200

    def is_silent() -> bool:
        before = len(infers(server))
        infer(server, b"{")
        return len(infers(server)) == before

    wait_for(is_silent, "no more lines")
    assert httpx.put(url, json={"level": "loud"}, timeout=60).status_code == 422
    assert httpx.get(url, timeout=60).json() == {"level": "error"}
