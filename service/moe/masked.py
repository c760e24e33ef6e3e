"""A layer's experts in the masked layout: [G, max_m, K] with a count of rows per expert.

It exists for measurements. It was never faster than the contiguous layout (1.02 to 1.4 times its time on an
H200, 1.4 to 2.4 times on a CPU; benchmarks/results/layouts-*.txt), so steps use it only up to
`masked_max_tokens`. It supports neither `local_experts` nor CUDA graphs.
"""

import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    HiddenStates,
    Permutation,
    Quantized,
    Weights,
    compute_permutation,
    grouped_gemm_masked,
    permute_rows,
    quantize_rows,
    swiglu,
    unpermute_rows,
)


def masked_experts(
    hidden_states: HiddenStates,
    group_ids: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    backend: Backend,
    num_sms: int | None,
    offsets: Tensor | None = None,
) -> Tensor:
    """As `fused_experts`: fp32 [T, H]; a row of group_ids int32 [T, top_k] must not name a group twice."""
    num_groups, max_m = down.data.shape[0], group_ids.shape[0]  # a group gets each token at most once
    permutation = compute_permutation(group_ids, num_groups)
    if offsets is not None:
        offsets.copy_(permutation.offsets, non_blocking=True)
    expected_m = -(-permutation.token_ids.numel() // num_groups)
    # Pairs without a group get any row, which is left out of the sum.
    at = permutation.group_ids.clamp(max=num_groups - 1), permutation.positions.clamp(max=max_m - 1)

    def multiply(rows: Quantized, b: Weights) -> Tensor:
        """Permuted rows [R, K] times b: bf16 [R, N]."""
        a = _spread(rows, permutation, num_groups, max_m)
        out = grouped_gemm_masked(
            a, b, permutation.counts, expected_m=expected_m, backend=backend, num_sms=num_sms
        )
        return out[at]

    if not isinstance(hidden_states, Quantized):
        hidden_states = quantize_rows(hidden_states)  # once per token
    rows = permute_rows(hidden_states, permutation.token_ids)
    # Activate only the existing rows: [G, max_m] is mostly empty.
    activated = quantize_rows(swiglu(multiply(rows, gate_up)))
    return unpermute_rows(multiply(activated, down), permutation.inverse, weights, permutation.absent)


def _spread(rows: Quantized, permutation: Permutation, num_groups: int, max_m: int) -> Quantized:
    """Scatter permuted rows to [G, max_m, K], scales column-major; the other rows stay uninitialized.

    Rows of no group, if there may be some, go past the last one's, one over the other.
    """
    k, device = rows.data.shape[1], rows.data.device
    at = permutation.group_ids, permutation.positions.clamp(max=max_m - 1)
    made = num_groups + (permutation.absent is not None)
    data = torch.empty((made, max_m, k), dtype=torch.float8_e4m3fn, device=device)
    data.view(torch.int64)[at] = rows.data.view(torch.int64)  # copied eight elements at a time
    size = (made, rows.scales.shape[1], max_m)
    scales = torch.empty(size, dtype=torch.float32, device=device).mT
    scales[at] = rows.scales
    return Quantized(data[:num_groups], scales[:num_groups])
