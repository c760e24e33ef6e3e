"""Requests, callers and calls of tests whose experts change their ranks."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.service.apps import MODEL, Serving, binary_request, output_of, rows
from tests.service.waiting import until

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


class Traffic:
    """Callers that ask again at once; `wrong` has what they should not have been told."""

    def __init__(self, server: Serving, bodies: Sequence[tuple[bytes, int]]) -> None:
        self._server, self._bodies = server, bodies
        self.right = self.refused = 0
        self.wrong: list[str] = []
        self._expected: list[NDArray[np.float32]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    async def __aenter__(self) -> "Traffic":
        self._expected = [output_of(await self._server.infer(*body)) for body in self._bodies]
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(len(self._bodies))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def more(self, count: int = 20) -> None:
        """Wait for some more right answers."""
        wanted = self.right + count
        await until(lambda: self.right >= wanted or bool(self.wrong), 30)

    async def _call(self, number: int) -> None:
        while not self._stopped:
            response = await self._server.infer(*self._bodies[number])
            if response.status_code == 503 and response.headers["retry-after"] == "1":
                self.refused += 1
                await asyncio.sleep(0.01)
            elif response.status_code != 200:
                self.wrong.append(f"{response.status_code}: {response.text[:200]!r}")
            elif np.array_equal(output_of(response), self._expected[number]):
                self.right += 1
            else:
                self.wrong.append(f"other bits in {number}")
