"""Servers on GPUs that end while they compute: what they accepted is answered, and they exit with 0."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.service.apps import hidden_request, rows, tiny_settings
from tests.service.http.test_hopper_lanes import SPLIT
from tests.service.processes import server_process

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
CALLERS = 8


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one GPU"),
        pytest.param(SPLIT, id="lanes"),
        pytest.param({"http_workers": 2}, id="HTTP processes"),
        pytest.param(
            {"devices": f"0-{min(8, GPUS) - 1}"},
            id="all GPUs",
            marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_sigterm_under_load(changes: dict[str, Any], tmp_path: Path) -> None:
    body, length = hidden_request(rows(64))
    headers = {"Inference-Header-Content-Length": str(length)}
    with (
        server_process(tiny_settings(backend="hopper", **changes), tmp_path, fork=False) as server,
        ThreadPoolExecutor(CALLERS) as pool,
    ):

        def call(terminates: bool) -> int:
            """Ask until the server says that it closes the connection; the number of answers."""
            with httpx.Client(base_url=f"http://{server.url}", headers=headers, timeout=60) as http:
                for answered in itertools.count(1):
                    answer = http.post("/v2/models/tiny/infer", content=body)
                    assert answer.status_code == 200, answer.text
                    if answer.headers.get("connection") == "close":
                        return answered
                    if terminates and answered == 20:
                        server.terminate()
            raise AssertionError

        callers = [pool.submit(call, number == 0) for number in range(CALLERS)]
        assert server.process.wait(60) == 0
        assert min(caller.result() for caller in callers) > 1
        assert "WARNING" not in server.log()
        assert "Traceback" not in server.log()
