"""A server on the Hopper backend, through tritonclient, compared with the reference layer."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
import tritonclient.http as triton

from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.settings.model import Settings
from tests.kernels.helpers import Diff
from tests.service.apps import binary_request
from tests.service.processes import server_process

pytestmark = pytest.mark.gpu

HIDDEN, TOKENS = 512, (1, 7, 300)


def settings(backend: str, weights: Path) -> Settings:
    model = {
        "name": "layer",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_experts": 16,
        "top_k": 4,
        "weights": {"path": str(weights)},
        "partition": "compute" if backend == "hopper" else None,
    }
    partitions = {"compute": 112, "communication": 20} if backend == "hopper" else {}
    return Settings.model_validate({"backend": backend, "partitions": partitions, "models": [model]})


def answers(
    backend: str, weights: Path, directory: Path, inputs: list[npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    directory.mkdir()
    outputs = []
    with (
        server_process(settings(backend, weights), directory) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        for values in inputs:
            tensor = triton.InferInput("hidden_states", list(values.shape), "FP32")
            tensor.set_data_from_numpy(values)
            outputs.append(client.infer("layer", [tensor]).as_numpy("hidden_states"))
        metrics = server.get("/metrics").text
        partitions = server.get("/v1/partitions")
    if backend == "hopper":
        assert partitions.status_code == 200, partitions.text
        assert "expertd_jit" in metrics
        assert '"compute"' in partitions.text
    return outputs


def test_both_backends_give_the_same_answers(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    shape = LayerShape(hidden_size=HIDDEN, intermediate_size=256, num_experts=16, top_k=4)
    save_weights(weights, random_weights(shape, 3, torch.device("cpu")))
    random = np.random.default_rng()
    inputs = [random.standard_normal((tokens, HIDDEN)).astype(np.float32) for tokens in TOKENS]
    hopper = answers("hopper", weights, tmp_path / "hopper", inputs)
    reference = answers("reference", weights, tmp_path / "reference", inputs)
    for ours, theirs in zip(hopper, reference, strict=True):
        difference = Diff()
        difference.add(torch.from_numpy(ours.copy()), torch.from_numpy(theirs.copy()))
        # The CPU rounds activations to bf16, Hopper to FP8: 1e-3 on average, with variation over few tokens.
        bound = 2e-3 if len(ours) >= 16 else 1e-2
        assert difference.value < bound, difference.value


def test_answers_stay_the_same_while_partitions_change(tmp_path: Path) -> None:
    """Small steps are CUDA graphs, which every change of partitions invalidates."""
    weights = tmp_path / "weights.safetensors"
    shape = LayerShape(hidden_size=HIDDEN, intermediate_size=256, num_experts=16, top_k=4)
    save_weights(weights, random_weights(shape, 3, torch.device("cpu")))
    tokens = torch.randn(300, HIDDEN).to(torch.bfloat16).view(torch.int16).numpy()
    with (
        server_process(settings("hopper", weights), tmp_path) as server,
        httpx.Client(base_url=f"http://{server.url}", timeout=60) as http,
        ThreadPoolExecutor(1) as pool,
    ):

        def answer(count: int) -> bytes:
            tensor = ("BF16", [count, HIDDEN], tokens[:count].tobytes())
            body, length = binary_request({"hidden_states": tensor}, parameters={"binary_data_output": True})
            headers = {"Inference-Header-Content-Length": str(length)}
            response = http.post("/v2/models/layer/infer", content=body, headers=headers)
            assert response.status_code == 200, response.text
            return response.content[int(response.headers["inference-header-content-length"]) :]

        def change(sizes: dict[str, int]) -> int:
            return httpx.put(
                f"http://{server.url}/v1/partitions", json={"partitions": sizes}, timeout=60
            ).status_code

        before = {count: answer(count) for count in TOKENS}
        for compute in (64, 64, 8, 112, 24):
            changes = [pool.submit(change, {"compute": compute}) for _ in range(3)]
            while not all(done.done() for done in changes):
                assert {count: answer(count) for count in TOKENS} == before
            assert [done.result() for done in changes] == [200, 200, 200]
            assert {count: answer(count) for count in TOKENS} == before
