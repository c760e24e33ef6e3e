"""SGLang's fused layer in Triton, with the configuration that its package has for the GPU."""

from collections.abc import Callable

from torch import Tensor

from benchmarks.layer.problem import Layer, LayerProblem
from benchmarks.peers import sglang_setup
from benchmarks.peers.layer_peer import BLOCK, LayerPeer


def prepare(problem: LayerProblem) -> Callable[[], Tensor]:
    """Its `fused_experts`, as its server calls it when one GPU has all of the experts."""
    sglang_setup.set_up()
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
    sglang_setup.set_up()
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_moe_configs

    return get_moe_configs(layer.num_experts, layer.intermediate_size, "fp8_w8a8", *BLOCK) is not None


PEER = LayerPeer("SGLang Triton", sglang_setup.available, sglang_setup.version, prepare, tuned)
