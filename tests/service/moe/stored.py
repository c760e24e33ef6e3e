"""Layers whose experts are in the host's memory, beside the same with all experts on the device."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    ExpertBiases,
    Quantized,
    Weights,
    dequantize_blocks,
    dequantize_rows,
)
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.service.device import device_of
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from expertd.weight_format import WeightFormat, WeightLayout

FOUR_BITS = {
    "MXFP4": WeightLayout(WeightFormat.MXFP4, 32, "U8"),
    "NVFP4": WeightLayout(WeightFormat.NVFP4, 16, "F8_E4M3"),
    "INT4": WeightLayout(WeightFormat.INT4, 32, "BF16"),
    "INT4 of 128": WeightLayout(WeightFormat.INT4, 128, "F32"),
}
"""Layouts of weights."""
PACKABLE = {
    name: replace(layout, scales="BF16") if layout.scales == "F32" else layout
    for name, layout in FOUR_BITS.items()
}
"""The same, with scales that hopper can pack."""


class Plain(ReferenceBackend):
    """Reads the weights that are in memory when it multiplies, and keeps none."""

    capabilities = replace(ReferenceBackend.capabilities, packs=frozenset())
    ffn = Backend.ffn

    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: Any) -> None:
        rows = dequantize_rows(*a, torch.float32)
        for group, (start, end) in enumerate(pairwise(offsets.tolist())):
            for row in range(start, end):  # one by one: a GEMM's bits may depend on its height
                out[row] = dequantize_blocks(b.data[group], b.scales[group]) @ rows[row]


def store_of(
    memory: StoreMemory,
    shape: LayerShape,
    num_slots: int,
    backend: Backend,
    seed: int,
    name: str = "tiny",
    biases: ExpertBiases | None = None,
) -> tuple[ExpertStore, MoELayer]:
    """A store, and its layer. biases: on the host."""
    device = memory.device.tensors
    weights = random_weights(shape, seed, device, experts_on=torch.device("cpu"))
    weights = replace(weights, biases=biases)
    store = ExpertStore(memory, name, shape, weights, num_slots, backend)
    return store, MoELayer(shape, store.on_device(weights), backend, store=store)


def stores_and_whole(
    shape: LayerShape,
    num_slots: int,
    backend: Backend,
    device: str,
    seeds: Sequence[int],
    biased: bool = False,
) -> list[tuple[ExpertStore, MoELayer, MoELayer]]:
    """For each seed a store, its layer, and the same layer with all experts on the device."""
    memory, made = StoreMemory(device_of(device)), []
    for seed in seeds:
        biases = random_biases(shape, seed) if biased else None
        store, layer = store_of(memory, shape, num_slots, backend, seed, str(seed), biases)
        weights = random_weights(shape, seed, device)
        if biases is not None:
            weights = replace(weights, biases=ExpertBiases(*(bias.to(device) for bias in biases)))
        made.append((store, layer, MoELayer(shape, weights, backend)))
    return made


def random_biases(shape: LayerShape, seed: int) -> ExpertBiases:
    """On the host, about as large as the products to which they are added."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2 * shape.intermediate_size, shape.hidden_size
    return ExpertBiases(
        *(torch.randn(shape.num_groups, size, generator=generator).bfloat16() for size in sizes)
    )
