"""SGLang's layer around CUTLASS's block-scaled grouped GEMM (`cutlass`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.layer.problem import LayerProblem
from benchmarks.peers import sglang_setup
from benchmarks.peers.cutlass import WORKSPACE_BYTES
from benchmarks.peers.layer_peer import LayerPeer


def prepare(problem: LayerProblem) -> Callable[[], Tensor]:
    """Its `cutlass_fused_experts_fp8`, with buffers like its server's."""
    sglang_setup.set_up()
    from sglang.srt.layers.moe.cutlass_moe import cutlass_fused_experts_fp8

    layer, weights, device = problem.layer, problem.weights, problem.hidden_states.device
    g, h, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
    matrices = [m.transpose(1, 2) for m in (weights.gate_up.data, weights.down.data)]
    scales = [s.transpose(1, 2) for s in (weights.gate_up.scales, weights.down.scales)]
    strides = [torch.full((g,), stride, dtype=torch.int64, device=device) for stride in (h, 2 * i, i, h)]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    pointers = [torch.empty(g, dtype=torch.int64, device=device) for _ in range(5)]
    offsets = torch.empty(g + 1, dtype=torch.int32, device=device)
    sizes = [torch.empty(g, 3, dtype=torch.int32, device=device) for _ in range(2)]

    def run() -> Tensor:
        routing = (problem.topk_weights, problem.topk_ids)
        buffers = (*strides, workspace, *pointers, offsets, *sizes)
        out: Tensor = cutlass_fused_experts_fp8(problem.hidden_states, *matrices, *scales, *routing, *buffers)
        return out

    return run


PEER = LayerPeer("SGLang CUTLASS", sglang_setup.available, sglang_setup.version, prepare)
