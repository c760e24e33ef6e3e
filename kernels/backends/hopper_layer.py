"""A layer's experts on Hopper: sort, quantise, GEMM with SwiGLU, GEMM, combine, in five launches."""

import math
from typing import Any

import numpy as np
import torch
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
from torch import Tensor

from kernels import jit, layer_kernels
from kernels.jit import Source
from kernels.quantize import Quantized


class LayerKernels:
    """The small kernels of one process, loaded on the devices where they were used."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, Source], Any] = {}

    def load(self, device: int, source: Source, binary: jit.Binary) -> Any:
        Device(device).set_current()  # the context that torch uses too
        kernel = ObjectCode.from_cubin(binary.cubin).get_kernel(source.entry)
        self._kernels[device, source] = kernel
        return kernel

    def sort(self, stream: Stream, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
        """(rows int32 [T, S], offsets int32 [G+1]) of group_ids int32 [T, S]."""
        rows = torch.empty_like(group_ids)
        offsets = torch.empty(num_groups + 1, dtype=torch.int32, device=group_ids.device)
        self._launch(
            stream, layer_kernels.SORT, LaunchConfig(grid=1, block=1024, shmem_size=32 * num_groups * 4),
            group_ids, np.int32(group_ids.numel()), np.int32(num_groups), rows, offsets,
        )  # fmt: skip
        return rows, offsets

    def quantize(self, stream: Stream, hidden_states: Tensor, rows: Tensor) -> Quantized:
        """Each token quantised once and written to all of its rows."""
        (num_tokens, k), num_rows = hidden_states.shape, rows.numel()
        data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=rows.device)
        scales = torch.empty((k // 128, num_rows), device=rows.device)
        self._launch(
            stream, layer_kernels.QUANTIZE[hidden_states.dtype],
            LaunchConfig(grid=(num_tokens, math.ceil(k / 512)), block=128),
            hidden_states, rows, np.int32(rows.shape[1]), np.int32(k), data, scales, np.uint32(num_rows),
        )  # fmt: skip
        return Quantized(data, scales.t())

    def combine(self, stream: Stream, values: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sums fp32 [T, N] of values bf16 [R, N]."""
        num_tokens, slots = rows.shape
        n = values.shape[1]
        out = torch.empty((num_tokens, n), device=values.device)
        self._launch(
            stream, layer_kernels.COMBINE, LaunchConfig(grid=(num_tokens, math.ceil(n / 2048)), block=256),
            values, rows, weights, np.int32(slots), np.int32(n), out,
        )  # fmt: skip
        return out

    def route(
        self,
        stream: Stream,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        *,
        softmax: bool,
        renormalize: bool,
        scale: float,
        groups: int,
        top_groups: int,
    ) -> tuple[Tensor, Tensor]:
        """(topk_ids, topk_weights) of logits fp32 [T, E]."""
        num_tokens, num_experts = logits.shape
        topk_ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
        topk_weights = torch.empty((num_tokens, top_k), device=logits.device)
        self._launch(
            stream, layer_kernels.ROUTE[8 if num_experts <= 256 else 32],
            LaunchConfig(grid=math.ceil(num_tokens / 4), block=128),
            logits, bias, np.int32(num_tokens), np.int32(num_experts), np.int32(top_k), np.int32(softmax),
            np.int32(renormalize), np.float32(scale), np.int32(groups), np.int32(top_groups),
            topk_ids, topk_weights,
        )  # fmt: skip
        return topk_ids, topk_weights

    def _launch(self, stream: Stream, source: Source, config: LaunchConfig, *arguments: Any) -> None:
        device = torch.cuda.current_device()
        kernel = self._kernels.get((device, source)) or self.load(device, source, jit.build(source))
        values = (a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments)
        launch(stream, config, kernel, *values)
