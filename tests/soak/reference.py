"""Inputs and what the layer makes of them, in float64 by code of its own."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from expertd.service.moe.weights import random_weights
from expertd.service.settings.model import Settings
from tests.service.moe.reference_layer import reference_layer

SIZES = (1, 1, 1, 2, 5, 16, 64)
_MOST = 0.03  # of the output's norm, that rounding activations to bf16 costs at most


class Sample(NamedTuple):
    """FP32 [tokens, hidden_size] each."""

    hidden_states: npt.NDArray[np.float32]
    output: npt.NDArray[np.float32]

    def is_right(self, output: npt.NDArray[Any]) -> bool:
        """Whether an answer is this sample's."""
        if output.shape != self.output.shape:
            return False
        return bool(np.linalg.norm(output - self.output) <= _MOST * np.linalg.norm(self.output))


def samples(settings: Settings, count: int = 3) -> list[Sample]:
    """`count` samples of each size."""
    shape = settings.models[0].shape
    weights = random_weights(shape, settings.models[0].weights.seed or 0, torch.device("cpu"))
    found: list[Sample] = []
    for seed in range(count):
        for size in SIZES:
            random = np.random.default_rng((seed, size, len(found)))
            values = random.standard_normal((size, shape.hidden_size), dtype=np.float32)
            output = reference_layer(torch.from_numpy(values), weights, shape.top_k)
            found.append(Sample(values, output.numpy().astype(np.float32)))
    return found
