"""Experts on a CPU: bf16 rows times FP8 weights where they lie, by a kernel that is compiled just in time."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels.backends.base import Backend
from expertd.kernels.backends.cpu.decode import BLOCK
from expertd.kernels.backends.cpu.instructions import COLUMNS
from expertd.kernels.backends.cpu.kernel import MAX_ROWS, PADDING_ROWS
from expertd.kernels.backends.cpu.program import Piece, program
from expertd.kernels.ops.activation import Activation, rounded_swiglu
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import Weights
from expertd.kernels.ops.quantize import HiddenStates, Quantized, dequantize_rows

_RUN_ROWS = 512  # whose intermediate results are still in the caches when they are read


class _Rows(NamedTuple):
    """Permuted rows start:end, all of one group, at most MAX_ROWS."""

    group: int
    start: int
    end: int


class CpuBackend(Backend):
    """A launch for each GEMM of about _RUN_ROWS rows. Activations stay bf16: CPUs have no FP8 arithmetic."""

    name: ClassVar[str] = "cpu"
    capabilities = BACKENDS["cpu"]

    def __init__(self) -> None:
        self._program = program()

    @torch.no_grad()
    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: int | None) -> None:
        self._multiply_groups(a, b, offsets.tolist(), out)

    @torch.no_grad()
    def masked(
        self,
        a: Quantized,
        b: Weights,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        for group, count in enumerate(counts.tolist()):
            rows = Quantized(a.data[group, :count], a.scales[group, :count])
            weights = Quantized(b.data[group : group + 1], b.scales[group : group + 1])
            self._multiply_groups(rows, weights, [0, count], out[group])

    def ffn(
        self,
        hidden_states: HiddenStates,
        tokens: Tensor,
        gate_up: Weights,
        down: Weights,
        offsets: Tensor,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        """See `Backend.ffn`; activations are rounded to bf16 alone."""
        if isinstance(hidden_states, Quantized):
            hidden_states = dequantize_rows(*hidden_states, torch.bfloat16)
        x = hidden_states.detach().to(torch.bfloat16).to(self._program.dtype)
        out = torch.empty((tokens.numel(), down.data.shape[1]), dtype=torch.bfloat16, device="cpu")
        for run in _runs(offsets.tolist()):
            start, end = run[0].start, run[-1].end
            rows = self._rows(x.index_select(0, tokens[start:end]))
            gate_up_rows = out.new_empty(end - start, gate_up.data.shape[1])
            self._launch(rows, gate_up, run, None if biases is None else biases.gate_up, gate_up_rows)
            rows = self._rows(rounded_swiglu(gate_up_rows, activation))
            self._launch(rows, down, run, None if biases is None else biases.down, out[start:end])
        return out

    def _multiply_groups(self, a: Quantized, b: Weights, bounds: Sequence[int], out: Tensor) -> None:
        rows = self._rows(dequantize_rows(*a, torch.bfloat16))
        for run in _runs(bounds):
            part = slice(run[0].start, run[-1].end)
            self._launch(rows[part], b, run, None, out[part])

    def _rows(self, rows: Tensor) -> Tensor:
        """A copy for a launch, with zeros behind them."""
        count, k = rows.shape
        padded = torch.empty(
            (count + PADDING_ROWS, -(-k // BLOCK) * BLOCK), dtype=self._program.dtype, device="cpu"
        )
        padded[:count, :k] = rows
        if padded.shape[1] > k:
            padded[:, k:] = 0
        return padded[:count]

    def _launch(
        self,
        rows: Tensor,
        weights: Weights,
        run: Sequence[_Rows],
        biases: Tensor | None,
        out: Tensor,
    ) -> None:
        """The products of a run, whose first row is that of `rows` and `out`, plus bf16 [G, N]."""
        if biases is not None and (missing := -biases.shape[1] % COLUMNS):
            biases = torch.nn.functional.pad(biases, (0, missing))
        data, scales = weights.data, weights.scales
        pieces = [
            Piece(
                _address(data, group),
                _address(scales, group),
                0 if biases is None else _address(biases, group),
                start - run[0].start,
                end - start,
            )
            for group, start, end in run
        ]
        self._program.launch(rows, data.shape[2], out, pieces)


def _address(of_groups: Tensor, group: int) -> int:
    """Where a group's part is; without a tensor of it, which would take longer."""
    return of_groups.data_ptr() + group * of_groups.stride(0) * of_groups.element_size()


def _runs(bounds: Sequence[int]) -> Iterator[list[_Rows]]:
    """The rows of all groups in runs of at least _RUN_ROWS, but for the last."""
    run: list[_Rows] = []
    for group, (start, end) in enumerate(pairwise(bounds)):
        num_parts = -(-(end - start) // MAX_ROWS)
        for part in range(num_parts):
            first, last = (start + (end - start) * cut // num_parts for cut in (part, part + 1))
            run.append(_Rows(group, first, last))
            if last - run[0].start >= _RUN_ROWS:
                yield run
                run = []
    if run:
        yield run
