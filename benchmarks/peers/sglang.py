"""SGLang's layers: in Triton, as its package has it tuned for the GPU, and around CUTLASS's grouped GEMM."""

from collections.abc import Callable
from functools import cache
from importlib.metadata import version as version_of
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.layer.problem import Layer, LayerProblem
from benchmarks.peers.cutlass import WORKSPACE_BYTES
from benchmarks.peers.peer import BLOCK, LayerPeer


def available() -> bool:
    """Whether sglang and sglang-kernel are installed."""
    return all(find_spec(name) is not None for name in ("sglang", "sgl_kernel"))


def version() -> str:
    """The versions of both packages."""
    return f"sglang {version_of('sglang')}, sglang-kernel {version_of('sglang-kernel')}"


@cache
def set_up() -> None:
    """Give SGLang the server options that its layers read, with their default values."""
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    options = SimpleNamespace(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
    set_global_server_args_for_scheduler(options)


def prepare_triton(problem: LayerProblem) -> Callable[[], Tensor]:
    """Its `fused_experts`, as its server calls it when one GPU has all of the experts."""
    set_up()
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_experts

    experts, weights = problem.layer.num_experts, problem.weights
    config = MoeRunnerConfig(num_experts=experts, num_local_experts=experts, inplace=False)
    routing = (problem.topk_weights, problem.topk_ids, None)
    matrices = (weights.gate_up.data, weights.down.data)
    scales = {"w1_scale": weights.gate_up.scales, "w2_scale": weights.down.scales}

    def run() -> Tensor:
        hidden_states = problem.hidden_states
        out: Tensor = fused_experts(
            hidden_states, *matrices, routing, config, use_fp8_w8a8=True, block_shape=BLOCK, **scales
        )
        return out

    return run


def tuned(layer: Layer) -> bool:
    """Whether the package has a configuration for the GPU and this layer."""
    set_up()
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_moe_configs

    return get_moe_configs(layer.num_experts, layer.intermediate_size, "fp8_w8a8", *BLOCK) is not None


def prepare_cutlass(problem: LayerProblem) -> Callable[[], Tensor]:
    """Its `cutlass_fused_experts_fp8`, with buffers like its server's."""
    set_up()
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


TRITON = LayerPeer("SGLang Triton", available, version, prepare_triton, tuned)
CUTLASS = LayerPeer("SGLang CUTLASS", available, version, prepare_cutlass)
