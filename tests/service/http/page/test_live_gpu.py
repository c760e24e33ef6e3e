"""What the page shows of a GPU: its SMs by partition, its sensors, and what its routers choose."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.apps import tiny_settings
from tests.service.processes import server_process

pytestmark = pytest.mark.gpu

MODEL = {
    "name": "layer",
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_experts": 16,
    "top_k": 4,
    "partition": "compute",
}


def test_a_gpu_has_partitions_sensors_and_routers(tmp_path: Path) -> None:
    settings = tiny_settings(backend="hopper", models=[MODEL], partitions={"compute": 64})
    with (
        server_process(settings, tmp_path) as server,
        httpx.Client(base_url=f"http://{server.url}", timeout=60) as http,
    ):

        def now() -> dict[str, Any]:
            last = http.get("/v1/live?events=1").text.split("\n\n")[-2]
            found: dict[str, Any] = json.loads(last.partition("data: ")[2])
            return found

        seen = now()
        assert seen["partitions"] == http.get("/v1/partitions").json()
        assert seen["partitions"]["partitions"]["compute"]["requested_sms"] == 64
        assert seen["gpus"]["0"]["power_watts"] > 0
        assert seen["gpus"]["0"]["sm_clock_hertz"] > 0

        sizes = {"partitions": {"compute": 32, "communication": 16}}
        assert http.put("/v1/partitions", json=sizes).status_code == 200
        assert set(now()["partitions"]["partitions"]) == {"compute", "communication"}

        rows = np.random.default_rng(0).standard_normal((20, 512), dtype=np.float32)
        body = (rows.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # BF16
        ids = http.post("/v1/models/layer/routing", content=body).json()["topk_ids"]
        headers = {"Inference-Header-Content-Length": "0"}
        assert http.post("/v2/models/layer/infer", content=body, headers=headers).status_code == 200
        assert now()["experts"]["tokens"] == np.bincount(np.ravel(ids), minlength=16).tolist()
