"""Experts on a CPU: FP8 weights as they are, times bf16 rows, by a kernel compiled just in time."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels.backends.base import Backend, Progress
from expertd.kernels.backends.cpu.kernel import BLOCK, COLUMNS, MAX_ROWS, PADDING_ROWS
from expertd.kernels.backends.cpu.program import Piece, program
from expertd.kernels.backends.weight_cache import WeightCache
from expertd.kernels.ops.activation import Activation, rounded_swiglu
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import W, Weights, groups_of
from expertd.kernels.ops.quantize import HiddenStates, Quantized, dequantize_rows

_RUN_ROWS = 512  # whose intermediate results are still in the caches when they are read


class _Matrix(NamedTuple):
    """Weights [N, K] of a group, padded with zeros to a multiple of COLUMNS and of BLOCK.

    codes   e4m3 [N / COLUMNS, K / pair, COLUMNS, pair]
    scales  fp32 [ceil(N / 128), ceil(K / 128)]
    """

    codes: Tensor
    scales: Tensor


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
        self._weights = WeightCache(self._matrices)

    def warm_up(self, progress: Progress | None = None) -> None:
        """See `Backend.warm_up`: it has compiled already."""

    def packed(self, weights: W) -> W:
        """See `Backend.packed`; calls need the scales only as a key to the matrices."""
        return self._weights.packed(weights)

    def prepare_weights(self, group: Weights) -> _Matrix:
        """See `Backend.prepare_weights`."""
        data, scales = group.data, group.scales
        n, k = (-(-size // step) * step for size, step in zip(data.shape, (COLUMNS, BLOCK), strict=True))
        codes, pair = data.view(torch.uint8), self._program.has.pair
        if (n, k) != data.shape:
            codes = torch.nn.functional.pad(codes, (0, k - data.shape[1], 0, n - data.shape[0]))
        codes = codes.view(n // COLUMNS, COLUMNS, k // pair, pair).transpose(1, 2).contiguous()
        return _Matrix(codes, scales.detach().clone(memory_format=torch.contiguous_format))

    def weights_changed(self, weights: Weights, groups: Sequence[int], prepared: Sequence[object]) -> None:
        """See `Backend.weights_changed`; else the next call would make the matrices of all groups again."""
        self._weights.refresh(weights, groups, [each for each in prepared if isinstance(each, _Matrix)])

    @torch.no_grad()
    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: int | None) -> None:
        self._contiguous(a, self._weights.get(b), offsets.tolist(), out)

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
        matrices = self._weights.get(b)
        for group, count in enumerate(counts.tolist()):
            rows = Quantized(a.data[group, :count], a.scales[group, :count])
            self._contiguous(rows, matrices[group : group + 1], [0, count], out[group])

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
        first, second = self._weights.get(gate_up), self._weights.get(down)
        out = torch.empty((tokens.numel(), down.data.shape[1]), dtype=torch.bfloat16, device="cpu")
        for run in _runs(offsets.tolist()):
            start, end = run[0].start, run[-1].end
            rows = self._rows(end - start, x.shape[1])
            rows[:, : x.shape[1]] = x.index_select(0, tokens[start:end])
            gate_up_rows = out.new_empty(end - start, gate_up.data.shape[1])
            self._launch(rows, first, run, None if biases is None else biases.gate_up, gate_up_rows)
            activated = rounded_swiglu(gate_up_rows, activation)
            rows = self._rows(end - start, activated.shape[1])
            rows[:, : activated.shape[1]] = activated
            self._launch(rows, second, run, None if biases is None else biases.down, out[start:end])
        return out

    def _matrices(self, weights: Weights) -> tuple[_Matrix, ...]:
        return tuple(self.prepare_weights(group) for group in groups_of(weights))

    def _contiguous(
        self, a: Quantized, matrices: Sequence[_Matrix], bounds: Sequence[int], out: Tensor
    ) -> None:
        rows = self._rows(bounds[-1], a.data.shape[1])
        rows[:, : a.data.shape[1]] = dequantize_rows(*a, torch.bfloat16)[: bounds[-1]]
        for run in _runs(bounds):
            part = slice(run[0].start, run[-1].end)
            self._launch(rows[part], matrices, run, None, out[part])

    def _rows(self, count: int, k: int) -> Tensor:
        """Uninitialized rows for a launch, as wide as matrices of k columns; zeros from column k on."""
        size = count + PADDING_ROWS, -(-k // BLOCK) * BLOCK
        rows = torch.empty(size, dtype=self._program.dtype, device="cpu")
        if size[1] > k:
            rows[:, k:] = 0
        return rows[:count]

    def _launch(
        self,
        rows: Tensor,
        matrices: Sequence[_Matrix],
        run: Sequence[_Rows],
        biases: Tensor | None,
        out: Tensor,
    ) -> None:
        """The products of a run, whose first row is that of `rows` and `out`, plus bf16 [G, N]."""
        if biases is not None:
            biases = torch.nn.functional.pad(biases, (0, -biases.shape[1] % COLUMNS)).contiguous()
        pieces = [
            Piece(
                matrices[group].codes.data_ptr(),
                matrices[group].scales.data_ptr(),
                0 if biases is None else biases[group].data_ptr(),
                start - run[0].start,
                end - start,
            )
            for group, start, end in run
        ]
        self._program.launch(rows, out, pieces)


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
