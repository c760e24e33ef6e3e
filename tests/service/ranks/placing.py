"""Requests and calls of tests whose experts change their ranks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.service.apps import MODEL, Serving, binary_request, rows

EXPERTS = 64
TOP_K = 4
MANY = {**MODEL, "num_experts": EXPERTS, "top_k": TOP_K}
STATIC = {"policy": "static", "replicas": 8}
LIMITS = {"max_request_tokens": 1024, "max_batch_tokens": 2048, "max_queue_tokens": 1 << 16}
SMALL = {**MODEL, "num_experts": 8, "top_k": 4, "num_shared_experts": 1}
# One request is one step: on any CPU, a row has the same bits in GEMMs of the same height.
ONE_EACH = {"max_request_tokens": 256, "max_batch_tokens": 256, "max_queue_tokens": 1 << 16}


def skewed(num_tokens: int, seed: int, exponent: float = 1.0) -> NDArray[np.int32]:
    """Distinct experts of each token, expert e with a weight of 1 / (e + 1) ** exponent."""
    random = np.random.default_rng(seed)
    popularity = -exponent * np.log(np.arange(1, EXPERTS + 1))
    keys = popularity + random.gumbel(size=(num_tokens, EXPERTS))
    return np.argsort(-keys, axis=1)[:, :TOP_K].astype(np.int32)


def uniform(num_tokens: int, seed: int) -> NDArray[np.int32]:
    """4 of 8 experts for each token."""
    random = np.random.default_rng(seed).random((num_tokens, 8))
    return np.argsort(random, axis=1)[:, :4].astype(np.int32)


def routed(ids: NDArray[np.int32], seed: int = 0) -> tuple[bytes, int]:
    """An infer request with this routing."""
    values, weights = rows(len(ids), seed), np.random.default_rng(seed).random(ids.shape, np.float32)
    tensors = {
        "hidden_states": ("FP32", list(values.shape), values.tobytes()),
        "topk_ids": ("INT32", list(ids.shape), ids.tobytes()),
        "topk_weights": ("FP32", list(weights.shape), weights.tobytes()),
    }
    return binary_request(tensors, parameters={"binary_data_output": True})


async def placement(server: Serving) -> Any:
    response = await server.http.get("/v1/placement")
    assert response.status_code == 200, response.text
    return response.json()


async def change(server: Serving, **body: Any) -> Any:
    response = await server.http.post("/v1/placement", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["models"]["tiny"]


def held(layer: Any) -> list[list[int]]:
    return [sorted(rank["experts"]) for rank in layer["ranks"]]
