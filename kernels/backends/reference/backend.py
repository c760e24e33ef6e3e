"""The reference backend: plain PyTorch, correct on any device and fast on a CPU."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels.backends.base import Backend
from expertd.kernels.backends.reference import cpu_ffn
from expertd.kernels.backends.reference.matrices import matrices_of, multiply, prepared_matrix
from expertd.kernels.backends.weight_cache import WeightCache
from expertd.kernels.ops.activation import Activation
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import W, Weights
from expertd.kernels.ops.quantize import HiddenStates, Quantized, dequantize_rows


class ReferenceBackend(Backend):
    """One matmul per non-empty group, in bf16, with dequantized weights cached while the caller's live."""

    name: ClassVar[str] = "reference"
    capabilities = BACKENDS["reference"]

    def __init__(self) -> None:
        self._weights = WeightCache(matrices_of)

    def packed(self, weights: W, *, pairs: bool = False) -> W:
        """See `Backend.packed`; on a CPU, calls need the matrices, and the scales only as a key to them."""
        return self._weights.packed(weights) if weights.data.is_cpu else weights

    def prepare_weights(self, group: Weights, *, pairs: bool = False) -> object:
        """See `Backend.prepare_weights`."""
        return prepared_matrix(group)

    def weights_changed(self, weights: Weights, groups: Sequence[int], prepared: Sequence[object]) -> None:
        """See `Backend.weights_changed`; else the next call would make the matrices of all groups again."""
        matrices = [matrix for matrix in prepared if isinstance(matrix, Tensor)]
        self._weights.refresh(weights, groups, matrices)

    @torch.no_grad()
    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: int | None) -> None:
        matrices = self._weights.get(b)
        rows = dequantize_rows(*a, torch.bfloat16)
        bounds = offsets.tolist()
        for group, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                out[start:end] = multiply(rows[start:end], matrices[group])

    @torch.no_grad()
    def masked(
        self,
        a: Quantized,
        b: Weights,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        matrices = self._weights.get(b)
        for group, count in enumerate(counts.tolist()):
            if count > 0:
                rows = dequantize_rows(a.data[group, :count], a.scales[group, :count], torch.bfloat16)
                out[group, :count] = multiply(rows, matrices[group])

    def ffn(
        self,
        hidden_states: HiddenStates,
        tokens: Tensor,
        gate_up: Weights,
        down: Weights,
        offsets: Tensor,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        """See `Backend.ffn`; on a CPU, which has no FP8 arithmetic, activations stay bf16."""
        if tokens.device.type != "cpu":
            return super().ffn(hidden_states, tokens, gate_up, down, offsets, activation, num_sms, biases)
        if isinstance(hidden_states, Quantized):
            hidden_states = dequantize_rows(*hidden_states, torch.bfloat16)
        matrices = self._weights.get(gate_up), self._weights.get(down)
        return cpu_ffn.ffn(hidden_states, tokens, *matrices, offsets.tolist(), activation, biases)
