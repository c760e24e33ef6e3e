"""The memory of a server whose layer is loaded, against what was computed for it."""

import re
from pathlib import Path

import httpx
import pytest

from expertd.backends import BACKENDS
from expertd.kernels.backends.reference.matrices import can_pack
from expertd.service.moe.needs import needs_of
from tests.service.apps import MODEL, tiny_settings
from tests.service.processes import server_process

LAYER = {
    "name": "layer", "hidden_size": 1024, "intermediate_size": 512, "num_experts": 40, "top_k": 4,
    "load": False,
}  # fmt: skip
TOKENS = 1024
BESIDE = 40_000_000  # bytes: of kernels that oneDNN compiles, and of a request's body and output


def memory(pid: int) -> dict[str, int]:
    """Bytes in memory: of all (VmRSS), at most until now (VmHWM), not of files (RssAnon)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}


@pytest.mark.thorough  # layers so large that the process itself is negligible
@pytest.mark.parametrize(("backend", "at_most"), [("cpu", 1.1), ("reference", 2.4)])
def test_a_loaded_layer_takes_the_memory_that_was_computed(
    backend: str, at_most: float, tmp_path: Path
) -> None:
    limits = {"max_request_tokens": TOKENS, "max_batch_tokens": TOKENS, "max_body_bytes": 1 << 23}
    settings = tiny_settings(limits, models=[MODEL, LAYER], backend=backend)
    shape = settings.models[1].shape
    needs, fp8 = (
        needs_of(shape, TOKENS, BACKENDS[backend]),
        needs_of(shape, TOKENS, BACKENDS["hopper"]).weights,
    )
    with server_process(settings, tmp_path, fork=False) as server:
        pid, before = server.process.pid, memory(server.process.pid)
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the peak
        with httpx.Client(base_url=f"http://{server.url}", timeout=300, verify=False) as client:
            assert client.post("/v2/repository/models/layer/load").status_code == 200
            ready = memory(pid)["RssAnon"] - before["RssAnon"]
            body = bytes(TOKENS * 1024 * 2)  # bf16, without a JSON header
            headers = {"Inference-Header-Content-Length": "0"}
            answer = client.post("/v2/models/layer/infer", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
        peak = memory(pid)["VmHWM"] - before["VmRSS"]
    figures = f"ready {ready}, peak {peak}, computed {needs}"
    assert needs.weights * 0.9 < ready < needs.weights + BESIDE, figures
    assert ready < at_most * fp8, figures
    # Where oneDNN does not pack bf16, loading takes more than what stays, for a moment.
    most = needs.total if backend == "cpu" or can_pack() else needs.total + needs.weights
    assert needs.weights < peak < most + BESIDE, figures
