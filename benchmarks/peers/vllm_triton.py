"""vLLM's fused layer in Triton, with the configuration that its package has for the GPU."""

import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

from torch import Tensor

from benchmarks.layer.problem import Layer, LayerProblem
from benchmarks.peers.peer import BLOCK, LayerPeer


def prepare(problem: LayerProblem) -> Callable[[], Tensor]:
    """Its `fused_experts`, with scales that are no powers of 2, as ours."""
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")  # whose scales are powers of 2
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    weights = problem.weights
    config = fp8_w8a8_moe_quant_config(
        w1_scale=weights.gate_up.scales, w2_scale=weights.down.scales, block_shape=BLOCK
    )
    routing = (problem.topk_weights, problem.topk_ids)

    def run() -> Tensor:
        matrices = (weights.gate_up.data, weights.down.data)
        out: Tensor = fused_experts(problem.hidden_states, *matrices, *routing, quant_config=config)
        return out

    return run


def tuned(layer: Layer) -> bool:
    """Whether the package has a configuration for the GPU and this layer."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    return get_moe_configs(layer.num_experts, layer.intermediate_size, "fp8_w8a8", *BLOCK) is not None


PEER = LayerPeer(
    "vLLM Triton",
    lambda: find_spec("vllm") is not None,
    lambda: f"vllm {version('vllm')}",
    prepare,
    tuned,
)
