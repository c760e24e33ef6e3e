"""A server with lanes on a Hopper GPU: the bits of one without, while splits change under traffic."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertd.service.settings.model import Settings
from tests.service.apps import binary_request
from tests.service.processes import server_process

pytestmark = pytest.mark.gpu

HIDDEN, TOKENS = 512, (1, 16, 17, 300, 2048)
MODEL = {"name": "tiny", "hidden_size": HIDDEN, "intermediate_size": 256, "num_experts": 16, "top_k": 4}
LANES = {"decode_max_tokens": 16, "decode_partition": "decode", "prefill_partition": "prefill"}
SPLIT = {"lanes": LANES, "partitions": {"decode": 48, "prefill": 84}}


def answer(url: str, count: int) -> bytes:
    """The output for the same bf16 tokens each time."""
    bits = np.random.default_rng(count).standard_normal((count, HIDDEN), np.float32).view(np.uint32) >> 16
    tensor = ("BF16", [count, HIDDEN], bits.astype(np.uint16).tobytes())
    body, length = binary_request({"hidden_states": tensor}, parameters={"binary_data_output": True})
    headers = {"Inference-Header-Content-Length": str(length)}
    response = httpx.post(f"http://{url}/v2/models/tiny/infer", content=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response.content[int(response.headers["inference-header-content-length"]) :]


def test_the_bits_of_a_server_without_lanes_while_splits_change(tmp_path: Path) -> None:
    def settings(**changes: object) -> Settings:
        return Settings.model_validate({"backend": "hopper", "models": [MODEL], **changes})

    (tmp_path / "plain").mkdir()
    with server_process(settings(), tmp_path / "plain") as server:
        expected = {count: answer(server.url, count) for count in TOKENS}
    (tmp_path / "lanes").mkdir()
    with server_process(settings(**SPLIT), tmp_path / "lanes") as server, ThreadPoolExecutor(8) as pool:
        url = server.url

        def repeat(count: int) -> int:
            return sum(answer(url, count) != expected[count] for _ in range(30))

        running = [pool.submit(repeat, count) for count in TOKENS]
        for decode in (16, 80, 48, 16):
            body = {"partitions": {"decode": decode, "prefill": 132 - decode}}
            changed = httpx.put(f"http://{url}/v1/partitions", json=body, timeout=60)
            assert changed.status_code == 200, changed.text
        assert [each.result(120) for each in running] == [0] * len(TOKENS)
        metrics = server.get("/metrics").text
    counted = [
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "expertd_lane_tokens_total"
    ]
    assert len(counted) == 2
    assert min(counted) > 0
