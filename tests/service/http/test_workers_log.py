"""Several HTTP processes: the log has one line for each request over HTTP, gRPC and channels."""

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.service.apps import HIDDEN, json_request, rows
from tests.service.channels.peer import Peer
from tests.service.channels.test_processes import opened
from tests.service.grpc.calls import ON, hidden_message
from tests.service.http.processes import GOOD, asked, two_processes
from tests.service.processes import ServerProcess, grpc_address, server_process
from tests.service.regions import SYSTEM, region_input
from tests.service.shm import shm_file
from tests.service.sockets import connect
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow

QUEUED = {"queue_seconds", "compute_seconds"}


def ask_in_every_way(server: ServerProcess) -> None:
    """Have a request answered over HTTP (3 tokens), in a region (4), over gRPC (5), and a channel (6)."""
    with connect(server.port) as sock:
        assert asked(sock, GOOD).status == 200
    with shm_file() as file:
        url = f"http://{server.url}{SYSTEM}/region/here/register"
        assert httpx.post(url, json={"key": file.key, "byte_size": 4096}).status_code == 200
        body = json_request(region_input("here", [4, HIDDEN]))
        assert httpx.post(f"http://{server.url}/v2/models/tiny/infer", content=body).status_code == 200
    with grpc.insecure_channel(grpc_address(server)) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        infer(hidden_message(rows(5)).SerializeToString(), timeout=30)
    peer = Peer(opened(server))
    assert peer.wait(peer.send(6, peer.places(1))).status == 200
    peer.close()


def settings_of(directory: Path, **changes: Any) -> Any:
    channels = {"socket": str(directory / "channels")}
    return two_processes(access_log=True, shared_memory={"enabled": True}, channels=channels, **ON, **changes)


def test_each_request_is_one_json_line(tmp_path: Path) -> None:
    with server_process(settings_of(tmp_path, log_format="json"), tmp_path) as server:
        ask_in_every_way(server)

        def infers() -> list[dict[str, Any]]:
            lines = [json.loads(line) for line in server.log().splitlines()]
            return [line for line in lines if line["message"].startswith("infer ")]

        wait_for(lambda: len(infers()) >= 4, "the lines of four requests")
        server.get("/v2/models/tiny")
        found = sorted(infers(), key=lambda line: int(line["tokens"]))
        assert [line["tokens"] for line in found] == [3, 4, 5, 6]
        over_http, in_region, over_grpc, over_channel = found
        for line in (over_http, in_region, over_grpc):
            assert {"receive_seconds", *QUEUED} <= line.keys(), line
            stages = line["receive_seconds"] + line["queue_seconds"] + line["compute_seconds"]
            assert stages <= line["seconds"] + 1e-5  # each is rounded
        assert over_channel.keys() >= QUEUED
        others = [json.loads(line) for line in server.log().splitlines() if "/v2/models/tiny" in line]
        assert len(others) == 1, "the process that answered it"


def test_each_request_is_one_line_of_text(tmp_path: Path) -> None:
    with server_process(settings_of(tmp_path), tmp_path) as server:
        ask_in_every_way(server)
        wait_for(lambda: "gRPC ModelInfer" in server.log(), "the line of the gRPC call")
        assert server.log().count("/v2/models/tiny/infer HTTP") == 2
        assert server.log().count('"gRPC ModelInfer" OK') == 1
