"""Inputs and what the layer makes of them, in float64 by code of its own."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from expertd.service.moe.weights import load_weights, random_weights
from expertd.service.settings.model import Settings
from tests.service.moe.reference_layer import reference_layer

SIZES = (1, 1, 1, 2, 5, 16, 64)
# Of the output's norm, what rounding costs at most: activations to bf16 on a CPU, twice to FP8 on a GPU.
_CLEAR = 0.05  # difference of logits, whose standard deviation is 1
_MOST = {"reference": 0.03, "hopper": 0.15}


class Sample(NamedTuple):
    """FP32 [tokens, hidden_size] each; `most` is the part of the output's norm that an answer may be off."""

    hidden_states: npt.NDArray[np.float32]
    output: npt.NDArray[np.float32]
    most: float

    def is_right(self, output: npt.NDArray[Any]) -> bool:
        """Whether an answer is this sample's."""
        if output.shape != self.output.shape:
            return False
        return bool(np.linalg.norm(output - self.output) <= self.most * np.linalg.norm(self.output))


def samples(settings: Settings, count: int = 3) -> list[Sample]:
    """`count` samples of each size; no token is so close to another expert that precision decides."""
    model = settings.models[0]
    shape, path = model.shape, model.weights.path
    weights = load_weights(path, shape, "cpu") if path else random_weights(shape, 0, "cpu")
    found: list[Sample] = []
    for seed in range(count):
        for size in SIZES:
            random = np.random.default_rng((seed, size, len(found)))
            drawn = random.standard_normal((8 * size, shape.hidden_size), dtype=np.float32)
            values = drawn[_is_clear(drawn, weights.router, shape.top_k)][:size]
            assert len(values) == size
            output = reference_layer(torch.from_numpy(values), weights, shape.top_k)
            found.append(Sample(values, output.numpy().astype(np.float32), _MOST[settings.backend]))
    return found


def _is_clear(values: npt.NDArray[np.float32], router: torch.Tensor, top_k: int) -> npt.NDArray[np.bool_]:
    """Which tokens prefer their last expert clearly to the next one; router [E, H]."""
    logits = np.sort(values @ router.float().numpy().T)
    clear: npt.NDArray[np.bool_] = logits[:, -top_k] - logits[:, -top_k - 1] > _CLEAR
    return clear
