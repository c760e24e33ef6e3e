"""Steps and routing for servers with ranks."""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.step.batch import FLOATS
from tests.service.apps import HIDDEN, NUM_EXPERTS, TOP_K, Serving, binary_request, output_of

LIMITS = {"max_request_tokens": 1024, "max_batch_tokens": 1024, "max_queue_tokens": 16384}


def routing(num_tokens: int, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Random distinct experts and weights."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K]
    return ids.astype(np.int32), random.random((num_tokens, TOP_K), np.float32)


async def routed(server: Serving, values: NDArray[np.float32], datatype: str) -> NDArray[np.float32]:
    """The output for given routing, with ids of `datatype`, in a binary request."""
    ids, weights = routing(len(values))
    tensors = {
        "hidden_states": ("FP32", list(values.shape), values.tobytes()),
        "topk_ids": (datatype, list(ids.shape), ids.astype(datatype.lower()).tobytes()),
        "topk_weights": ("FP32", list(weights.shape), weights.tobytes()),
    }
    body, length = binary_request(tensors, parameters={"binary_data_output": True})
    return output_of(await server.infer(body, length))


def request(
    values: NDArray[np.float32], datatype: str, output_datatype: str, given: bool = False
) -> LayerRequest:
    """A request of the runner, as bytes."""
    hidden_states = torch.from_numpy(values).to(FLOATS[datatype]).view(torch.uint8).numpy().tobytes()
    ids, weights = (tensor.tobytes() if given else None for tensor in routing(len(values)))
    return LayerRequest(len(values), hidden_states, datatype, ids, "INT32", weights, output_datatype)


async def outputs_of(server: Serving, requests: Sequence[LayerRequest]) -> list[NDArray[np.float32]]:
    """The outputs of one step."""
    assert server.app.engine.loaded is not None
    runner = server.app.engine.loaded.runners["tiny"]
    result = await asyncio.to_thread(lambda: runner.begin(requests).finish())
    assert result.num_tokens == sum(request.num_tokens for request in requests)
    assert result.tokens_per_expert.sum() == TOP_K * result.num_tokens
    tensors = [
        torch.frombuffer(bytearray(host_view(output)), dtype=FLOATS[request.output_datatype])
        for request, output in zip(requests, result.outputs, strict=True)
    ]
    return [tensor.float().numpy().reshape(-1, HIDDEN) for tensor in tensors]
