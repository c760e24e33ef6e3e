"""The layer in PyTorch, with weights in bf16: what FP8 and fused kernels save."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.layer.problem import LayerProblem
from benchmarks.peers.peer import BLOCK, LayerPeer
from expertd.kernels import Quantized


def prepare(problem: LayerProblem) -> Callable[[], Tensor]:
    """Sort by expert, two `torch._grouped_mm`, and the weighted sum."""
    gate_up, down = (_bf16(w).transpose(1, 2) for w in (problem.weights.gate_up, problem.weights.down))
    num_tokens, top_k = problem.topk_ids.shape

    def run() -> Tensor:
        experts = problem.topk_ids.flatten().long()
        order = experts.argsort(stable=True)
        counts = torch.zeros(problem.layer.num_experts, dtype=torch.int32, device=order.device)
        ends = counts.index_add_(0, experts, torch.ones_like(experts, dtype=torch.int32)).cumsum(0).int()
        rows = problem.hidden_states[order // top_k]
        gate, up = torch._grouped_mm(rows, gate_up, ends).chunk(2, dim=1)
        rows = torch._grouped_mm(silu(gate) * up, down, ends)
        back = torch.empty_like(rows).index_copy_(0, order, rows).view(num_tokens, top_k, -1)
        return torch.einsum("tk,tkh->th", problem.topk_weights.bfloat16(), back)

    return run


def _bf16(weights: Quantized) -> Tensor:
    """[E, N, K] without scales, one expert at a time."""
    out = torch.empty(weights.data.shape, dtype=torch.bfloat16, device=weights.data.device)
    for expert, data, scales in zip(out, weights.data, weights.scales, strict=True):
        whole = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        expert.copy_(data.float() * whole[: data.shape[0], : data.shape[1]])
    return out


PEER = LayerPeer(
    "PyTorch bf16",
    lambda: hasattr(torch, "_grouped_mm"),
    lambda: f"torch {torch.__version__}",
    prepare,
)
