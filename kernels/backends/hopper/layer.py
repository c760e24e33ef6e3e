"""The kernels of a layer around its GEMMs on Hopper: route, sort, quantize, combine."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda.core import LaunchConfig, launch
from torch import Tensor

from expertd.kernels import jit
from expertd.kernels.backends.hopper import layer_kernels
from expertd.kernels.backends.hopper.launch import LoadedKernels, OnStream, describe_rows
from expertd.kernels.backends.hopper.tensor_maps import DescriptorCache
from expertd.kernels.ops.quantize import Quantized
from expertd.routing import Routing

_SORT_ALONE = 1024  # pairs that one CTA sorts sooner than a cluster does
_SORT_CTAS = 8
_SORT_CTAS_FROM = 64  # SMs, among which there are surely so many neighbours as a cluster wants
_FEW_TOKENS = 256  # up to so many, the CTAs of both routing launches find room at once


class _Grid(NamedTuple):
    size: int  # in clusters
    cluster: int = 1
    shared_bytes: int = 0


class Sorted(NamedTuple):
    """Where pairs go: rows int32 [T, S], -1 for no group's; offsets int32 [G+1].

    claims int32 [2, 2] are zeros, by which the CTAs of two GEMMs share out their tiles.
    """

    rows: Tensor
    offsets: Tensor
    claims: Tensor


class Logits(NamedTuple):
    """data fp32 [N, T, E], to be added up over N: `sums` neighbours first, then these one after another."""

    data: Tensor
    sums: int


class LayerKernels:
    """The small kernels, on the devices where they were used."""

    def __init__(self, kernels: LoadedKernels) -> None:
        self._kernels = kernels
        self._descriptors = DescriptorCache(describe_rows)

    def load(self, device: int, source: jit.Source, binary: jit.Binary) -> None:
        """Bring a kernel onto a device."""
        self._kernels.load(
            device, source, binary, layer_kernels.shared_bytes(source, layer_kernels.MAX_GROUPS)
        )

    def sort(self, on: OnStream, topk_ids: Tensor, num_groups: int, num_sms: int | None) -> Sorted:
        """The order of topk_ids int32 [T, S]."""
        rows = torch.empty_like(topk_ids)
        claims = torch.empty((2, 2), dtype=torch.int32, device=topk_ids.device)
        offsets = torch.empty(num_groups + 1, dtype=torch.int32, device=topk_ids.device)
        alone = topk_ids.numel() <= _SORT_ALONE or (num_sms is not None and num_sms < _SORT_CTAS_FROM)
        few = topk_ids.numel() <= layer_kernels.FEW_PAIRS
        shared_bytes = 0 if few else layer_kernels.shared_bytes(layer_kernels.SORT, num_groups)
        self._launch(
            on, layer_kernels.SORT, _Grid(1, 1 if alone else _SORT_CTAS, shared_bytes),
            topk_ids, np.int32(topk_ids.numel()), np.int32(num_groups), rows, offsets, claims,
        )  # fmt: skip
        return Sorted(rows, offsets, claims)

    def quantize(self, on: OnStream, hidden_states: Tensor, rows: Tensor) -> Quantized:
        """Each token quantized once and written to all of its rows."""
        (num_tokens, k), num_rows = hidden_states.shape, rows.numel()
        data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=rows.device)
        scales = torch.empty((k // 128, num_rows), device=rows.device)
        self._launch(
            on, layer_kernels.QUANTIZE[hidden_states.dtype], _Grid(num_tokens * math.ceil(k / 2048)),
            hidden_states, rows, np.int32(rows.shape[1]), np.int32(k), data, scales, np.uint32(num_rows),
        )  # fmt: skip
        return Quantized(data, scales.t())

    def combine(self, on: OnStream, values: Tensor, rows: Tensor, weights: Tensor, out: Tensor) -> None:
        """The weighted sums of values bf16 [R, N] into out [T, N]."""
        (num_tokens, slots), n = rows.shape, values.shape[1]
        self._launch(
            on, layer_kernels.COMBINE[out.dtype], _Grid(num_tokens * math.ceil(n / 2048)),
            values, rows, weights, np.int32(slots), np.int32(n), out,
        )  # fmt: skip

    def logits(self, on: OnStream, hidden_states: Tensor, router: Tensor) -> Logits:
        """Of bf16 [T, H] and [E, H]: the same bits in any company, once they are added up."""
        (num_tokens, k), num_experts = hidden_states.shape, router.shape[0]
        sums = layer_kernels.LOGITS_SUMS
        parts = math.ceil(k / (sums * layer_kernels.LOGITS_COLUMNS))
        tiles = math.ceil(num_tokens / layer_kernels.LOGITS_TOKENS)
        tiles *= math.ceil(num_experts / layer_kernels.LOGITS_EXPERTS)
        left = sums if num_tokens <= _FEW_TOKENS else 1
        logits = torch.empty((parts * left, num_tokens, num_experts), device=hidden_states.device)
        self._launch(
            on, layer_kernels.LOGITS,
            _Grid(tiles * parts * left, shared_bytes=layer_kernels.shared_bytes(layer_kernels.LOGITS, 0)),
            self._descriptors.get(hidden_states, layer_kernels.LOGITS_TOKENS),
            self._descriptors.get(router, layer_kernels.LOGITS_EXPERTS),
            np.int32(num_tokens), np.int32(num_experts),
            np.int32(parts * left), np.int32(sums // left), logits,
        )  # fmt: skip
        return Logits(logits, left)

    def route(
        self, on: OnStream, logits: Logits, bias: Tensor | None, top_k: int, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """(topk_ids int32 [T, k], topk_weights fp32 [T, k]) of fresh logits; see `choose_experts`."""
        numbers, num_tokens, num_experts = logits.data.shape
        topk_ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.data.device)
        topk_weights = torch.empty((num_tokens, top_k), device=logits.data.device)
        shared_bytes = layer_kernels.shared_bytes(layer_kernels.ROUTE, num_experts)
        self._launch(
            on, layer_kernels.ROUTE, _Grid(num_tokens, shared_bytes=shared_bytes),
            logits.data, np.int32(numbers // logits.sums), np.int32(logits.sums),
            np.int32(logits.sums > 1), bias,
            np.int32(num_experts), np.int32(top_k),
            np.int32(routing.scoring_func == "softmax"), np.int32(routing.renormalize),
            np.float32(routing.routed_scaling_factor),
            np.int32(routing.num_expert_groups), np.int32(routing.topk_group), topk_ids, topk_weights,
        )  # fmt: skip
        return topk_ids, topk_weights

    def _launch(self, on: OnStream, source: jit.Source, grid: _Grid, *arguments: Any) -> None:
        device, _, stream = on
        if not self._kernels.loaded(device, source):
            self.load(device, source, jit.build(source))
        values = (a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments)
        config = _config(grid, layer_kernels.THREADS[source.entry])
        launch(stream, config, self._kernels.get(device, source), *values)


@functools.lru_cache(maxsize=4096)
def _config(grid: _Grid, threads: int) -> LaunchConfig:
    return LaunchConfig(
        grid=grid.size,
        cluster=grid.cluster,
        block=threads,
        shmem_size=grid.shared_bytes,
        programmatic_stream_serialization=True,
    )
