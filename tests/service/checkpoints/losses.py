"""Measures encodings and formats of weights: `python -m tests.service.checkpoints.losses` prints the tables.

Errors are relative, in percent: the root mean square of a difference over that of the exact weights or rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    Weights,
    decode,
    dequantize_blocks,
    fused_experts,
    quantize_blocks,
)
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.ops.four_bits import quantize_int4, quantize_mxfp4, quantize_nvfp4
from expertd.service.checkpoints.weights import quantize_by_powers
from tests.service.checkpoints.encoders import ENCODERS

_SIZE = (1024, 2048)
_LAYER = (1024, 512, 8, 128)
"""Hidden size, intermediate size, experts, and tokens, of top 2."""
_FORMATS: dict[str, Callable[[Tensor], Weights]] = {
    "FP8": quantize_blocks,
    "MXFP4": quantize_mxfp4,
    "INT4": quantize_int4,
    "NVFP4": quantize_nvfp4,
}


class _InSteps(ReferenceBackend):
    """With the steps of GPUs, whose activations are FP8."""

    ffn = Backend.ffn


def losses() -> dict[str, tuple[float, float]]:
    """By encoding: its own error, and the error that rounding its numbers to FP8 by blocks adds to them."""
    weight = torch.randn(_SIZE, generator=torch.Generator().manual_seed(0)) * _SIZE[1] ** -0.5
    found = {}
    for encode, form, _ in ENCODERS.values():
        _, meant = encode(weight)
        quantize = quantize_by_powers if form.startswith("MX") else quantize_blocks
        added = 0.0  # a scale per tensor becomes that of each block
        if form != "FP8, a scale per tensor":
            added = _error(dequantize_blocks(*quantize(meant)), meant)
        found[form] = _error(meant, weight), added
    return found


def layer_losses() -> dict[str, tuple[float, float, float]]:
    """By format, against the layer in float64 with the same weights: on a CPU, and with steps in FP8.

    The third is what the format's weights add to the layer with the bf16 weights from which they were made.
    """
    h, i, experts, tokens = _LAYER
    generator = torch.Generator().manual_seed(0)
    plain = [
        (torch.randn((experts, n, k), generator=generator) * k**-0.5).to(torch.bfloat16)
        for n, k in ((2 * i, h), (h, i))
    ]
    x = torch.randn((tokens, h), generator=generator).to(torch.bfloat16)
    ids = torch.rand((tokens, experts), generator=generator).argsort(1)[:, :2].to(torch.int32)
    topk_weights = torch.rand((tokens, 2), generator=generator)
    exact = exact_experts(x, ids, topk_weights, *(matrix.double() for matrix in plain))
    found = {}
    for name, quantize in _FORMATS.items():
        gate_up, down = map(quantize, plain)
        meant = exact_experts(x, ids, topk_weights, decode(gate_up).double(), decode(down).double())
        got = [
            _error(fused_experts(x, ids, topk_weights, gate_up, down, backend=backend).double(), meant)
            for backend in (ReferenceBackend(), _InSteps())
        ]
        found[name] = got[0], got[1], _error(meant, exact)
    return found


def exact_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(down)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ gate_up[expert].t()).chunk(2, 1)
        rows = (torch.nn.functional.silu(gate) * up) @ down[expert].t()
        out.index_add_(0, tokens, rows * weights[tokens, slots].double()[:, None])
    return out


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm()) * 100


def main() -> None:
    """Print the tables."""
    print("| encoding | its own error | added by rounding to FP8 |\n|---|---|---|")
    for name, (own, added) in losses().items():
        print(f"| {name} | {own:.2f} | {added:.2f} |")
    print("\n| weights | bf16 activations | FP8 activations | its own error |\n|---|---|---|---|")
    for name, errors in layer_losses().items():
        print(f"| {name} | {' | '.join(f'{error:.2f}' for error in errors)} |")


if __name__ == "__main__":
    main()
