"""Layers whose experts are in the host's memory, beside the same with all experts on the device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from expertd.kernels import Backend
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


def store_of(
    memory: StoreMemory, shape: LayerShape, num_slots: int, backend: Backend, seed: int, name: str = "tiny"
) -> tuple[ExpertStore, MoELayer]:
    """A store, and its layer."""
    device = memory.device.tensors
    weights = random_weights(shape, seed, device, experts_on=torch.device("cpu"))
    store = ExpertStore(memory, name, shape, weights, num_slots, backend)
    own = replace(weights, gate_up=store.slots.gate_up, down=store.slots.down, shared=store.shared)
    return store, MoELayer(shape, own, backend, store=store)


def stores_and_whole(
    shape: LayerShape, num_slots: int, backend: Backend, device: str, seeds: Sequence[int]
) -> list[tuple[ExpertStore, MoELayer, MoELayer]]:
    """For each seed a store, its layer, and the same layer with all experts on the device."""
    memory = StoreMemory(device_of(device))
    made = [store_of(memory, shape, num_slots, backend, seed, str(seed)) for seed in seeds]
    whole = [MoELayer(shape, random_weights(shape, seed, device), backend) for seed in seeds]
    return [(store, layer, other) for (store, layer), other in zip(made, whole, strict=True)]
