"""One layer's tensors on the GPU: the inputs of our layer, and the same rows in the form its peers need."""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertd.kernels import Quantized, compute_permutation, fused_experts, permute_rows, quantize_rows, swiglu
from expertd.kernels.backends import Backend, resolve_backend


@dataclass(frozen=True)
class Layer:
    """The experts of a layer on one GPU, and the number of them that each token goes to."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


LAYERS = (
    Layer("deepseek-v3/ep8", 7168, 2048, 32, 8),
    Layer("qwen3-30b-a3b", 2048, 768, 128, 8),
    Layer("qwen3-235b/ep4", 4096, 1536, 32, 8),
)


@dataclass(frozen=True)
class LayerWeights:
    """gate_up [E, 2I, H], the gates' rows first, and down [E, H, I]."""

    gate_up: Quantized
    down: Quantized


@dataclass(frozen=True)
class LayerProblem:
    """One call of a layer: hidden_states bf16 [T, H], topk_ids int32 and topk_weights fp32 [T, k]."""

    layer: Layer
    weights: LayerWeights
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    out: Tensor  # bf16 [T, H]

    def run(self) -> Tensor:
        """Our layer."""
        arguments = (self.hidden_states, self.topk_ids, self.topk_weights)
        return fused_experts(*arguments, self.weights.gate_up, self.weights.down, out=self.out)

    def rows(self) -> tuple[Quantized, Quantized, list[int]]:
        """(rows of the first GEMM, rows of the second, rows of each expert), sorted by expert."""
        backend: Backend = resolve_backend("hopper")
        none = self.layer.num_experts  # of slots without an expert, whose rows are the last
        permutation = compute_permutation(self.topk_ids.where(self.topk_ids >= 0, none), none)
        first = permute_rows(quantize_rows(self.hidden_states), permutation.token_ids)
        size = (permutation.token_ids.numel(), 2 * self.layer.intermediate_size)
        gate_up = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        backend.contiguous(first, self.weights.gate_up, permutation.offsets, gate_up, None)
        return first, quantize_rows(swiglu(gate_up)), permutation.counts.tolist()


def make_weights(layer: Layer) -> LayerWeights:
    """Random e4m3, distributed like quantized normal data; scales keep the output as large as the input."""
    h, i = layer.hidden_size, layer.intermediate_size
    return LayerWeights(_weights(layer.num_experts, 2 * i, h), _weights(layer.num_experts, h, i))


def make_problem(layer: Layer, weights: LayerWeights, num_tokens: int) -> LayerProblem:
    """Random tokens, each with different experts, all equally likely."""
    hidden_states = torch.randn(num_tokens, layer.hidden_size, device="cuda").to(torch.bfloat16)
    drawn = torch.rand(num_tokens, layer.num_experts, device="cuda").argsort(dim=1)
    topk_ids = drawn[:, : layer.top_k].to(torch.int32).contiguous()
    topk_weights = torch.rand(num_tokens, layer.top_k, device="cuda")
    return LayerProblem(
        layer, weights, hidden_states, topk_ids, topk_weights, torch.empty_like(hidden_states)
    )


def _weights(num_experts: int, n: int, k: int) -> Quantized:
    data = torch.empty(num_experts, n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for expert in data:
        expert.copy_((torch.randn(n, k, device="cuda") * 166).clamp(-448, 448))
    scales = (torch.rand(num_experts, n // 128, k // 128, device="cuda") + 0.5) * (k**-0.5 / 166)
    return Quantized(data, scales)
