"""Measures encodings and formats of weights: `python -m tests.service.checkpoints.losses` prints the tables.

Errors are relative, in percent: the root mean square of a difference over that of the exact weights or rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

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

Round = Callable[[Tensor], Tensor]
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


def _exact(rows: Tensor) -> Tensor:
    return rows


def _bf16(rows: Tensor) -> Tensor:
    return rows.to(torch.bfloat16).double()


def _e4m3_by_powers(rows: Tensor) -> Tensor:
    """With a power of two for each 128 columns of a row (`scale_fmt: ue8m0`)."""
    groups = rows.view(len(rows), -1, 128)
    scales = torch.exp2((groups.abs().amax(2, keepdim=True) / 448).log2().ceil())
    return ((groups / scales).float().to(torch.float8_e4m3fn).double() * scales).flatten(1)


def _nvfp4(rows: Tensor) -> Tensor:
    return decode(quantize_nvfp4(rows.float())).double()


VENDORS: dict[str, tuple[str, str, Round]] = {
    "gpt-oss": ("MXFP4", "bf16", _bf16),
    "DeepSeek-V4": ("MXFP4", "e4m3, a power of two per 128", _e4m3_by_powers),
    "Kimi-K2 Thinking, K2.5": ("INT4", "bf16", _bf16),
    "NVFP4 exports": ("NVFP4", "NVFP4", _nvfp4),
}
"""The weights of a publisher's checkpoints, and the activations in GEMMs that its files name."""


@dataclass(frozen=True)
class _Layer:
    """A layer of normal weights and tokens: bf16 weights, tokens and their routing."""

    gate_up: Tensor
    down: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor

    def exact(self, gate_up: Tensor, down: Tensor, rounded: Round = _exact, result: Round = _exact) -> Tensor:
        """`exact_experts` with these weights."""
        return exact_experts(self.x, self.ids, self.weights, gate_up.double(), down.double(), rounded, result)

    def ours(self, gate_up: Weights, down: Weights, backend: Backend) -> Tensor:
        return fused_experts(self.x, self.ids, self.weights, gate_up, down, backend=backend).double()


def _made() -> _Layer:
    h, i, experts, tokens = _LAYER
    generator = torch.Generator().manual_seed(0)
    plain = [
        (torch.randn((experts, n, k), generator=generator) * k**-0.5).to(torch.bfloat16)
        for n, k in ((2 * i, h), (h, i))
    ]
    x = torch.randn((tokens, h), generator=generator).to(torch.bfloat16)
    ids = torch.rand((tokens, experts), generator=generator).argsort(1)[:, :2].to(torch.int32)
    topk_weights = torch.rand((tokens, 2), generator=generator)
    return _Layer(plain[0], plain[1], x, ids, topk_weights)


def layer_losses() -> dict[str, tuple[float, float, float]]:
    """By format, against the layer in float64 with the same weights: on a CPU, and with steps in FP8.

    The third is what the format's weights add to the layer with the bf16 weights from which they were made.
    """
    layer = _made()
    exact = layer.exact(layer.gate_up, layer.down)
    found = {}
    for name, quantize in _FORMATS.items():
        gate_up, down = quantize(layer.gate_up), quantize(layer.down)
        meant = layer.exact(decode(gate_up), decode(down))
        got = [
            _error(layer.ours(gate_up, down, backend), meant) for backend in (ReferenceBackend(), _InSteps())
        ]
        found[name] = got[0], got[1], _error(meant, exact)
    return found


def vendor_losses() -> dict[str, tuple[float, float, float]]:
    """By checkpoint, with its weights: the error of its publisher's arithmetic, that of steps in FP8, and
    the difference between the two.
    """
    layer, found = _made(), {}
    for name, (form, _, rounded) in VENDORS.items():
        gate_up, down = _FORMATS[form](layer.gate_up), _FORMATS[form](layer.down)
        matrices = decode(gate_up), decode(down)
        meant, theirs = layer.exact(*matrices), layer.exact(*matrices, rounded, _bf16)
        ours = layer.ours(gate_up, down, _InSteps())
        found[name] = _error(theirs, meant), _error(ours, meant), _error(ours, theirs)
    return found


def exact_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    rounded: Round = _exact,
    result: Round = _exact,
) -> Tensor:
    """The layer in float64; `rounded` are the inputs of both products, and `result` theirs."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(down)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = result(rounded(x[tokens].double()) @ gate_up[expert].t()).chunk(2, 1)
        rows = result(rounded(torch.nn.functional.silu(gate) * up) @ down[expert].t())
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
    print("\n| checkpoint | weights | its activations | its error | ours | between them |")
    print("|---|---|---|---|---|---|")
    for name, errors in vendor_losses().items():
        form, activations, _ = VENDORS[name]
        print(f"| {name} | {form} | {activations} | {' | '.join(f'{error:.2f}' for error in errors)} |")


if __name__ == "__main__":
    main()
