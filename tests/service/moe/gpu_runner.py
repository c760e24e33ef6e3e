"""A small layer on a GPU, and the kinds of memory that its requests lie in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from expertd.kernels import resolve_backend
from expertd.service.device import device_of
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import fresh_generator
from tests.service.moe.requests import Place, as_bytes, on_gpu, pinned

SHAPE = LayerShape(hidden_size=512, intermediate_size=256, num_experts=24, top_k=4, num_shared_experts=1)
DEVICE = torch.device("cuda", 0)
PLACES: dict[str, Place] = {"bytes": as_bytes, "pinned": pinned, "gpu": on_gpu}


@contextmanager
def runner_with_graphs() -> Iterator[LayerRunner]:
    """Runs steps of up to 256 tokens as graphs."""
    weights = random_weights(SHAPE, fresh_generator().initial_seed(), "cuda")
    runner = LayerRunner(MoELayer(SHAPE, weights, resolve_backend("hopper")), device_of(DEVICE))
    runner.capture(device_of(DEVICE).new_graph_pool())
    yield runner
    runner.release_graphs()
