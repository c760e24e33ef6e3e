"""One layer's tensors on the GPU: the inputs of our layer, and the same rows in the form its peers need."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from expertd.kernels import (
    Activation,
    ExpertBiases,
    OtherGlu,
    Quantized,
    Swiglu,
    compute_permutation,
    fused_experts,
    permute_rows,
    quantize_rows,
    swiglu,
)
from expertd.kernels.backends import Backend, resolve_backend


@dataclass(frozen=True)
class Layer:
    """The experts of a layer on one GPU, and the number of them that each token goes to.

    activation  the experts'; another one than SwiGLU comes with biases
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: Activation = Swiglu()  # noqa: RUF009  (a tuple)

    @property
    def is_common(self) -> bool:
        """Whether every peer can compute it."""
        return self.activation == Swiglu()


LAYERS = (
    Layer("deepseek-v3/ep8", 7168, 2048, 32, 8),
    Layer("qwen3-30b-a3b", 2048, 768, 128, 8),
    Layer("qwen3-235b/ep4", 4096, 1536, 32, 8),
)


MODELS = (
    Layer("gpt-oss-120b", 2880, 2944, 128, 4, OtherGlu(1.702, 7.0, 1.0)),  # 2880, filled with zeros
    Layer("qwen3-next", 2048, 512, 512, 10),
    Layer("glm-5/ep8", 6144, 2048, 32, 8),
)
"""Layers of further models, measured with --models."""


@dataclass(frozen=True)
class LayerWeights:
    """gate_up [E, 2I, H], the gates' rows first, and down [E, H, I]; biases if the layer has some."""

    gate_up: Quantized
    down: Quantized
    biases: ExpertBiases | None = None

    @cached_property
    def whole_gate_up(self) -> Quantized:
        """gate_up with columns of zeros up to a multiple of 128, which peers need."""
        data = self.gate_up.data.view(torch.uint8)
        filled = torch.nn.functional.pad(data, (0, -data.shape[2] % 128))
        return Quantized(filled.view(self.gate_up.data.dtype), self.gate_up.scales)


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
        weights = self.weights
        return fused_experts(
            *arguments, weights.gate_up, weights.down,
            activation=self.layer.activation, biases=weights.biases, out=self.out,
        )  # fmt: skip

    def rows(self) -> tuple[Quantized, Quantized, list[int]]:
        """(rows of the first GEMM, rows of the second, rows of each expert), sorted by expert.

        Those of the first belong to `LayerWeights.whole_gate_up`. Biases are left out.
        """
        backend: Backend = resolve_backend("hopper")
        permutation = compute_permutation(self.topk_ids, self.layer.num_experts)
        missing = -self.layer.hidden_size % 128
        filled = torch.nn.functional.pad(self.hidden_states, (0, missing))
        first = permute_rows(quantize_rows(filled), permutation.token_ids)
        size = (permutation.token_ids.numel(), 2 * self.layer.intermediate_size)
        gate_up = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        backend.contiguous(first, self.weights.whole_gate_up, permutation.offsets, gate_up, None)
        return first, quantize_rows(swiglu(gate_up, self.layer.activation)), permutation.counts.tolist()


def make_weights(layer: Layer) -> LayerWeights:
    """Random e4m3, distributed like quantized normal data; scales keep the output as large as the input."""
    h, i = layer.hidden_size, layer.intermediate_size
    biases = None
    if not layer.is_common:
        gate_up, down = (
            torch.randn(layer.num_experts, n, device="cuda").to(torch.bfloat16) for n in (2 * i, h)
        )
        biases = ExpertBiases(gate_up, down)
    return LayerWeights(_weights(layer.num_experts, 2 * i, h), _weights(layer.num_experts, h, i), biases)


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
    scales = (torch.rand(num_experts, -(-n // 128), -(-k // 128), device="cuda") + 0.5) * (k**-0.5 / 166)
    return Quantized(data, scales)
