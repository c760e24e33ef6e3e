"""A kernel that faults on a GPU: nobody waits for an answer, and the process ends with code 1."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.paths import ROOT
from tests.service.apps import error_of, hidden_request, rows
from tests.service.engine.faulting import TOKENS
from tests.service.processes import ServerProcess, clean_environment

pytestmark = pytest.mark.gpu

EXPECTED = "the device has failed: CUDA error: an illegal memory access was encountered"


def test_a_kernel_that_faults_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.engine.faulting"],
            stderr=stderr,
            cwd=ROOT,
            env=clean_environment(),
        )
    try:
        server = ServerProcess(process, log)
        server.wait_ready()

        def ask(num_tokens: int) -> httpx.Response | None:
            """None: the process has ended before it accepted the request."""
            body, length = hidden_request(rows(num_tokens))
            headers = {"Inference-Header-Content-Length": str(length)}
            url = f"http://{server.url}/v2/models/tiny/infer"
            try:
                return httpx.post(url, content=body, headers=headers, timeout=60)
            except httpx.ConnectError:
                return None

        before = ask(1)
        assert before is not None
        assert before.status_code == 200, before.text
        with ThreadPoolExecutor(9) as pool:
            fault = pool.submit(ask, TOKENS)
            others = [pool.submit(ask, 64) for _ in range(8)]
            refused = fault.result()
            assert refused is not None
            assert error_of(refused, 503) == EXPECTED
            answers = [answer for other in others if (answer := other.result()) is not None]
        assert all(answer.status_code in (200, 503) for answer in answers)
        assert process.wait(60) == 1
        assert f"{EXPECTED}: this process ends, and has to be started again" in server.log()
    finally:
        process.kill()
        process.wait()
