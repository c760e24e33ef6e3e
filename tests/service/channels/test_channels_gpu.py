"""Channels of a server on a GPU: host memory that it reads in place, and memory of the caller's GPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.paths import ROOT
from tests.service.apps import HIDDEN, hidden_request, rows, tiny_settings
from tests.service.channels.peer import Peer
from tests.service.gpus import devices_of_servers
from tests.service.processes import ServerProcess, clean_environment, server_process
from tests.service.waiting import wait_for

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=devices_of_servers())
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One for each number of GPUs."""
    directory = tmp_path_factory.mktemp("server")
    limits = {"max_request_tokens": 512, "max_batch_tokens": 512, "max_queue_tokens": 4096}
    channels = {"socket": str(directory / "channels")}
    settings = tiny_settings(limits, backend="hopper", channels=channels, devices=request.param)
    with server_process(settings, directory) as process:
        yield process


@pytest.mark.parametrize("num_tokens", [1, 16, 300])
def test_host_memory(server: ServerProcess, num_tokens: int) -> None:
    request = {"version": 3, "model": "tiny", "num_slots": 2, "max_tokens": 512}
    peer = Peer(httpx.post(f"http://{server.url}/v1/channels", json=request, timeout=60).json())
    hidden_states = rows(num_tokens)
    body, length = hidden_request(hidden_states)
    headers = {"Inference-Header-Content-Length": str(length)}
    response = httpx.post(f"http://{server.url}/v2/models/tiny/infer", content=body, headers=headers)
    size = int(response.headers["Inference-Header-Content-Length"])
    over_http = np.frombuffer(response.content[size:], np.float32).reshape(num_tokens, HIDDEN)
    for _ in range(5):
        assert np.array_equal(peer.infer(hidden_states), over_http)
    peer.close()


def check_caller(server: ServerProcess, gpu: int, **environment: str) -> None:
    """Have a process use memory of a GPU, as it counts them."""
    caller = subprocess.run(
        [sys.executable, "-m", "tests.service.channels.caller_gpu", f"http://{server.url}", "tiny", str(gpu)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
        env=clean_environment(**environment),
    )
    assert caller.returncode == 0, caller.stderr
    errors = json.loads(caller.stdout)
    assert len(errors) == 16
    assert max(errors.values()) < 1e-5, errors
    idle = "expertd_channel_bytes 0.0"
    wait_for(lambda: idle in server.get("/metrics").text, "the regions are closed")


@pytest.mark.parametrize("neighbour", [0, 1])
def test_memory_of_the_callers_gpu(server: ServerProcess, neighbour: int) -> None:
    check_caller(server, neighbour if torch.cuda.device_count() > neighbour else 0)


@pytest.mark.parametrize("visible", ["1", "0", "1,0"])
def test_memory_of_gpus_that_others_number_otherwise_or_do_not_see(
    visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    limits = {"max_request_tokens": 512, "max_batch_tokens": 512, "max_queue_tokens": 4096}
    channels = {"socket": str(tmp_path / "channels")}
    with server_process(tiny_settings(limits, backend="hopper", channels=channels), tmp_path) as server:
        for gpu, seen in ((0, "0,1"), (1, "0,1"), (0, "1"), (0, "0")):
            check_caller(server, gpu, CUDA_VISIBLE_DEVICES=seen)
