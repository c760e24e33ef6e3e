"""A layer on Hopper: a sequence of launches, each of which may begin before the preceding one ends."""

import torch
from torch import Tensor

from expertd.kernels.backends.hopper.compute_permutation import compute_permutation
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm, Groups
from expertd.kernels.backends.hopper.launch import Kernels, OnStream
from expertd.kernels.backends.hopper.quantize_permute import quantize_permute
from expertd.kernels.backends.hopper.route_tokens import route_tokens
from expertd.kernels.backends.hopper.router_logits import router_logits
from expertd.kernels.backends.hopper.tensor_maps import TensorMapCache, describe_rows
from expertd.kernels.backends.hopper.unpermute_rows import unpermute_rows
from expertd.kernels.ops.activation import Swiglu
from expertd.kernels.ops.quantize import Quantized
from expertd.layout import Layout
from expertd.routing import Routing


class Layer:
    """Routing and experts; nothing here reads a tensor on the host."""

    def __init__(self, kernels: Kernels, gemm: GroupedGemm) -> None:
        self._kernels = kernels
        self._gemm = gemm
        self._tensor_maps = TensorMapCache(describe_rows)

    def route(
        self,
        on: OnStream,
        hidden_states: Tensor,
        router: Tensor,
        router_bias: Tensor | None,
        top_k: int,
        routing: Routing,
        end_token: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(topk_ids, topk_weights) of bf16 [T, H] by a bf16 router [E, H]; two launches, batch-invariant.

        hidden_states and router are contiguous and 16-byte aligned. The preceding launch must not write
        router and router_bias, which are read before it ends.
        """
        logits = router_logits(self._kernels, on, self._tensor_maps, hidden_states, router)
        return route_tokens(self._kernels, on, logits, router_bias, top_k, routing, end_token)

    def experts(
        self,
        on: OnStream,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Quantized,
        down: Quantized,
        out: Tensor,
        activation: Swiglu,
        num_sms: int | None,
        offsets: Tensor | None,
    ) -> None:
        """Write out; see `fused_experts`. Five launches, on at least two SMs.

        hidden_states is contiguous and 16-byte aligned.
        """
        num_groups, h, _ = down.data.shape
        inverse, device_offsets, tile_counters = compute_permutation(
            self._kernels, on, topk_ids, num_groups, num_sms, offsets
        )
        first, second = (
            Groups(device_offsets, ready=True, tile_counter=counter) for counter in tile_counters.unbind()
        )
        a = quantize_permute(self._kernels, on, hidden_states, inverse)
        activated = self._gemm.multiply_swiglu(on, a, gate_up, first, activation, num_sms)
        rows = torch.empty((inverse.numel(), h), dtype=torch.bfloat16, device=inverse.device)
        expected_m = inverse.numel() / num_groups
        self._gemm.multiply(on, Layout.CONTIGUOUS, activated, down, second, rows, expected_m, num_sms)
        unpermute_rows(self._kernels, on, rows, inverse, topk_weights, out)
