"""A layer's experts in the masked layout: each expert's rows in a slab of its own, [G, max_m, K] with counts.

For measurements: it is nowhere faster than the contiguous layout (1.02 to 1.4 times its time on an H200, 1.4
to 2.4 times on a CPU; benchmarks/results/layouts-*.txt), so no step takes it unless `masked_max_tokens` says
so. It supports neither absent experts nor CUDA graphs.
"""

import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    Permutation,
    Quantized,
    compute_permutation,
    grouped_gemm_masked,
    permute_rows,
    quantize_rows,
    swiglu,
    unpermute_rows,
)


def masked_experts(
    hidden_states: Tensor,
    group_ids: Tensor,
    weights: Tensor,
    gate_up: Quantized,
    down: Quantized,
    backend: Backend,
    num_sms: int | None,
) -> Tensor:
    """fp32 [T, H], what `fused_experts` gives; group_ids int32 [T, top_k], each a group and none twice."""
    num_groups, max_m = down.data.shape[0], hidden_states.shape[0]  # a group gets a token once at most
    permutation = compute_permutation(group_ids, num_groups)
    expected_m = -(-permutation.token_ids.numel() // num_groups)

    def multiply(rows: Quantized, b: Quantized) -> Tensor:
        """Of permuted rows [R, K]: bf16 [R, N]."""
        a = _spread(rows, permutation, num_groups, max_m)
        out = grouped_gemm_masked(
            a, b, permutation.counts, expected_m=expected_m, backend=backend, num_sms=num_sms
        )
        return out[permutation.group_ids, permutation.positions]

    rows = permute_rows(quantize_rows(hidden_states), permutation.token_ids)  # quantized once per token
    # Only the rows that exist go through the activation: [G, max_m] is mostly empty.
    activated = quantize_rows(swiglu(multiply(rows, gate_up)))
    return unpermute_rows(multiply(activated, down), permutation.inverse, weights)


def _spread(rows: Quantized, permutation: Permutation, num_groups: int, max_m: int) -> Quantized:
    """Permuted rows in their slabs [G, max_m, K], scales column-major; the rest is not written."""
    k, device = rows.data.shape[1], rows.data.device
    at = permutation.group_ids, permutation.positions
    data = torch.empty((num_groups, max_m, k), dtype=torch.float8_e4m3fn, device=device)
    data.view(torch.int64)[at] = rows.data.view(torch.int64)  # copied eight elements at a time
    scales = torch.empty((num_groups, rows.scales.shape[1], max_m), device=device).mT
    scales[at] = rows.scales
    return Quantized(data, scales)
