"""Servers on GPUs that end while they compute: what they accepted is answered, and they exit with 0."""

import itertools
import re
import threading
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


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one GPU"),
        pytest.param(SPLIT, id="lanes"),
        pytest.param({"http_workers": 2}, id="HTTP processes"),
        pytest.param(
            {"devices": f"0-{min(4, GPUS) - 1}"},
            id="several GPUs",
            marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_sigterm_under_load(changes: dict[str, Any], tmp_path: Path) -> None:
    # Callers hear of the end before the server refuses what comes later.
    settings = tiny_settings(backend="hopper", shutdown_delay_seconds=1.0, **changes)
    with (
        server_process(settings, tmp_path, fork=False) as server,
        ThreadPoolExecutor(8) as pool,
    ):

        def call(num_tokens: int) -> int:
            """Ask until the server says that it closes the connection; the number of answers."""
            body, length = hidden_request(rows(num_tokens))
            headers = {"Inference-Header-Content-Length": str(length)}
            with httpx.Client(base_url=f"http://{server.url}", headers=headers, timeout=60) as http:
                for answered in itertools.count(1):
                    answer = http.post("/v2/models/tiny/infer", content=body)
                    assert answer.status_code == 200, answer.text
                    if answer.headers.get("connection") == "close":
                        return answered
                    under_load.release()
            raise AssertionError

        under_load = threading.Semaphore(0)
        callers = [pool.submit(call, num_tokens) for num_tokens in (8, 64) * 4]
        loaded = all(under_load.acquire(timeout=60) for _ in range(20 * len(callers)))
        server.terminate()
        assert min(caller.result() for caller in callers) > 1
        assert loaded
        assert server.process.wait(60) == 0
        assert not re.search("WARNING|ERROR|Traceback", server.log())
