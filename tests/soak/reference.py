"""Inputs and what the layer makes of them, in float64 by code of its own."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from expertd.service.moe.weights import load_weights, random_weights
from expertd.service.settings.model import Settings
from tests.service.moe.reference_layer import reference_layer

SIZES = {1: 64, 2: 16, 5: 16, 16: 12, 64: 4, 256: 1}
"""Tokens of a request: how often. Long ones are several chunks, and the longest have bodies in the arena."""
MAX_TOKENS = max(SIZES)
# Of the output's norm, what rounding costs at most: activations to bf16 on a CPU, twice to FP8 on a GPU.
_CLEAR = 0.05  # difference of logits, whose standard deviation is 1
_MOST = {"cpu": 0.03, "reference": 0.03, "hopper": 0.15, "triton": 0.15}


class Sample(NamedTuple):
    """Hidden states and output [tokens, hidden_size]; the routing, [tokens, top_k] each, if it is given.

    most   the part of the output's norm that an answer may be off
    share  how often it is picked, beside the shares of others
    """

    hidden_states: npt.NDArray[Any]  # float32 or bfloat16
    output: npt.NDArray[np.float32]
    most: float
    share: int
    topk_ids: npt.NDArray[np.int32] | None = None
    topk_weights: npt.NDArray[np.float32] | None = None

    @property
    def datatype(self) -> str:
        return "FP32" if self.hidden_states.dtype == np.float32 else "BF16"

    @property
    def tensors(self) -> dict[str, tuple[str, npt.NDArray[Any]]]:
        """The inputs of a request: name -> datatype and values."""
        hidden_states = {"hidden_states": (self.datatype, self.hidden_states)}
        if self.topk_ids is None or self.topk_weights is None:
            return hidden_states
        routing = {"topk_ids": ("INT32", self.topk_ids), "topk_weights": ("FP32", self.topk_weights)}
        return {**hidden_states, **routing}

    @property
    def arguments(self) -> tuple[npt.NDArray[Any], ...]:
        """Of a client's `infer`, but for the model."""
        if self.topk_ids is None or self.topk_weights is None:
            return (self.hidden_states,)
        return self.hidden_states, self.topk_ids, self.topk_weights

    def is_right(self, output: npt.NDArray[Any]) -> bool:
        """Whether an answer is this sample's."""
        if output.shape != self.output.shape:
            return False
        difference = output.astype(np.float32) - self.output
        return bool(np.linalg.norm(difference) <= self.most * np.linalg.norm(self.output))


def samples(settings: Settings, count: int = 3, sizes: Mapping[int, int] = SIZES) -> list[Sample]:
    """`count` samples of each size in FP32, then one in BF16, and one whose routing is given.

    No token that the layer routes is so close to another expert that precision decides.
    """
    model = settings.models[0]
    shape, path = model.shape, model.weights.path
    weights = load_weights(path, shape, "cpu") if path else random_weights(shape, 0, "cpu")
    most = _MOST[settings.backend]

    def made(values: npt.NDArray[Any], share: int, *routing: npt.NDArray[Any]) -> Sample:
        hidden = torch.from_numpy(values.astype(np.float32))
        ids, chosen = map(torch.from_numpy, routing) if routing else (None, None)
        output = reference_layer(hidden, weights, shape.top_k, topk_ids=ids, topk_weights=chosen)
        return Sample(values, output.numpy().astype(np.float32), most, share, *routing)

    def of_size(size: int, share: int) -> Iterator[Sample]:
        for seed in range(count + 2):
            random = np.random.default_rng((seed, size))
            drawn = random.standard_normal((8 * size, shape.hidden_size), dtype=np.float32)
            values: npt.NDArray[Any] = drawn[_is_clear(drawn, weights.router, shape.top_k)][:size]
            assert len(values) == size
            if seed < count:
                yield made(values, share)
            elif seed == count:
                yield made(values.astype(ml_dtypes.bfloat16), share)
            else:
                experts = np.tile(np.arange(shape.num_experts, dtype=np.int32), (size, 1))
                ids = np.ascontiguousarray(random.permuted(experts, axis=1)[:, : shape.top_k])
                yield made(values, share, ids, random.random(ids.shape, dtype=np.float32))

    return [sample for size, share in sizes.items() for sample in of_size(size, share)]


def _is_clear(values: npt.NDArray[np.float32], router: torch.Tensor, top_k: int) -> npt.NDArray[np.bool_]:
    """Which tokens prefer their last expert clearly to the next one; router [E, H]."""
    logits = np.sort(values @ router.float().numpy().T)
    clear: npt.NDArray[np.bool_] = logits[:, -top_k] - logits[:, -top_k - 1] > _CLEAR
    return clear
