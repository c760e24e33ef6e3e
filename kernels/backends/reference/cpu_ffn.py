"""The FFNs of experts on a CPU, on bf16 tensors, in runs of rows that fit the caches."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from expertd.kernels.backends.reference.matrices import HEIGHT_STEP, Matrices, multiply
from expertd.kernels.ops.activation import Activation, rounded_swiglu
from expertd.kernels.ops.biases import ExpertBiases

_MAX_HEIGHT = 512  # rows per GEMM; with more, the intermediate results do not fit the L2 cache
_RUN_ROWS = 256  # groups of fewer rows share the work between the GEMMs


class _Piece(NamedTuple):
    """Permuted rows start:end, all of one group, to be multiplied at once."""

    group: int
    start: int
    end: int
    padded_end: int  # the GEMM computes rows up to here; those past end are dropped


def ffn(
    hidden_states: Tensor,
    tokens: Tensor,
    gate_up: Matrices,
    down: Matrices,
    bounds: Sequence[int],
    activation: Activation,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """`Backend.ffn` on CPU tensors, with offsets as a list and activations rounded only to bf16."""
    x = hidden_states.detach().to(torch.bfloat16)
    out = torch.empty((tokens.numel(), x.shape[1]), dtype=torch.bfloat16, device=x.device)
    if any(end - start >= HEIGHT_STEP for start, end in pairwise(bounds)):
        tokens = torch.nn.functional.pad(tokens, (0, HEIGHT_STEP))  # padding rows of the last GEMM
    for run in _runs(bounds):
        start, end = run[0].start, run[-1].end
        a = x.index_select(0, tokens[start : run[-1].padded_end])
        gate_up_parts = _multiply(a, gate_up, run, None if biases is None else biases.gate_up)
        activated = rounded_swiglu(torch.cat(gate_up_parts) if len(run) > 1 else gate_up_parts[0], activation)
        down_parts = _multiply(activated, down, run, None if biases is None else biases.down)
        if end < run[-1].padded_end:
            down_parts[-1] = down_parts[-1][: end - run[-1].start]
        torch.cat(down_parts, out=out[start:end])
    return out


def _runs(bounds: Sequence[int]) -> Iterator[list[_Piece]]:
    """The groups' rows in runs of pieces, about _RUN_ROWS rows each."""
    run: list[_Piece] = []
    for group, (start, end) in enumerate(pairwise(bounds)):
        # By this group's rows alone: its output must not depend on which others share the call.
        step = HEIGHT_STEP if end - start >= HEIGHT_STEP else 1
        num_pieces = -(-(end - start) // _MAX_HEIGHT)
        for piece in range(num_pieces):
            first, last = (start + (end - start) * cut // num_pieces for cut in (piece, piece + 1))
            run.append(_Piece(group, first, last, last + (first - last) % step))
            if last - run[0].start >= _RUN_ROWS:
                yield run
                run = []
    if run:
        yield run


def _multiply(rows: Tensor, matrices: Matrices, run: list[_Piece], biases: Tensor | None) -> list[Tensor]:
    """Each piece's rows of its product; the last keeps its padding rows, which the second GEMM reads."""
    first, parts = run[0].start, list[Tensor]()
    for group, start, end, padded_end in run:
        bias = None if biases is None else biases[group]
        part = multiply(rows[start - first : padded_end - first], matrices[group], bias)
        parts.append(part[: end - start] if end < padded_end and len(parts) + 1 < len(run) else part)
    return parts
