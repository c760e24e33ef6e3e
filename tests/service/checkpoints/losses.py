"""Measures what `requantize: allow` costs: `python -m tests.service.checkpoints.losses` prints the table.

Errors are relative, in percent: the root mean square of a difference over that of the weights.
"""

import torch
from torch import Tensor

from expertd.kernels import dequantize_blocks, quantize_blocks
from expertd.service.checkpoints.weights import quantize_by_powers
from tests.service.checkpoints.encoders import ENCODERS

_SIZE = (1024, 2048)


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


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm()) * 100


def main() -> None:
    """Print the table."""
    print("| encoding | its own error | added by rounding to FP8 |\n|---|---|---|")
    for name, (own, added) in losses().items():
        print(f"| {name} | {own:.2f} | {added:.2f} |")


if __name__ == "__main__":
    main()
