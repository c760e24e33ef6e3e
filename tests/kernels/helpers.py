"""Inputs, poisoned outputs and the error measure shared by every grouped GEMM test, on any device."""

import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from expertd.kernels import (
    ExpertBiases,
    OtherGlu,
    Quantized,
    Weights,
    decode,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
)
from expertd.kernels.ops.activation import Activation
from expertd.kernels.ops.four_bits import mapped

DEQUANTIZED_TOLERANCE = 1e-5
UNQUANTIZED_TOLERANCE = 1e-3
# Quantization costs about 7e-4 on average: with fewer outputs than this, chance alone can exceed 1e-3.
_ENOUGH_OUTPUTS = 2048
# The reference backend rounds its operands to bf16: 8 outputs exceed 1e-5 in 7 of 100 draws, 256 in none.
_FEW_OUTPUTS = 256
_POISON = 0x7FA5  # a bf16 NaN that no arithmetic produces
_GUARD_ROWS = 8
_CHUNK = 1 << 24  # elements converted to float64 at a time


@dataclass(frozen=True)
class ContiguousCase:
    """Inputs of `grouped_gemm_contiguous` and their unquantized values; rows_per_group is on the host."""

    x: Tensor  # bf16 [M, K]
    w: Tensor  # bf16 [G, N, K]
    a: Quantized
    b: Weights
    offsets: Tensor  # int32 [G+1]
    rows_per_group: tuple[int, ...]

    @property
    def label(self) -> str:
        g, n, k = self.w.shape
        return f"groups {g}, n {n}, k {k}, rows {_shorten(self.rows_per_group)}"

    def groups(self) -> Iterator[tuple[int, slice]]:
        """The non-empty groups, with their rows."""
        start = 0
        for group, rows in enumerate(self.rows_per_group):
            if rows:
                yield group, slice(start, start + rows)
            start += rows


@dataclass(frozen=True)
class MaskedCase:
    """Inputs of `grouped_gemm_masked` and their unquantized values; row_counts is on the host."""

    x: Tensor  # bf16 [G, max_m, K]
    w: Tensor  # bf16 [G, N, K]
    a: Quantized
    b: Weights
    counts: Tensor  # int32 [G]
    row_counts: tuple[int, ...]

    @property
    def label(self) -> str:
        g, n, k = self.w.shape
        return f"groups {g}, max_m {self.x.shape[1]}, n {n}, k {k}, counts {_shorten(self.row_counts)}"


class Diff:
    """1 - 2<x,y>/(<x,x>+<y,y>), accumulated piece by piece in float64; NaN anywhere makes it NaN."""

    def __init__(self) -> None:
        self._xy = self._squares = 0.0
        self.elements = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        for p, q in zip(_pieces(x), _pieces(y), strict=True):
            p, q = p.double(), q.double()
            self._xy += torch.dot(p, q).item()
            self._squares += torch.dot(p, p).item() + torch.dot(q, q).item()
        self.elements += x.numel()

    @property
    def value(self) -> float:
        return 1 - 2 * self._xy / self._squares if self._squares != 0 else 0.0


def diff(x: Tensor, y: Tensor) -> float:
    """The error measure of two tensors of one shape: 0 when equal, about half the squared relative error."""
    gathered = Diff()
    gathered.add(x, y)
    return gathered.value


def expected_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Weights,
    down: Weights,
    activation: Activation,
    biases: ExpertBiases | None,
) -> Tensor:
    """What `fused_experts` computes, in float64 [T, H], one expert at a time."""
    alpha, limit, *_ = activation
    after = isinstance(activation, OtherGlu) and activation.clamp_after
    out = torch.zeros(hidden_states.shape, dtype=torch.float64, device=hidden_states.device)
    for expert in range(down.data.shape[0]):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        first, second = (decode(mapped(w, itemgetter(expert))).double() for w in (gate_up, down))
        products = hidden_states[tokens].double() @ first.t()
        if biases is not None:
            products += biases.gate_up[expert].double()
        gate, up = products.chunk(2, dim=1)
        gate, up = gate if after else gate.clamp(max=limit), up.clamp(-limit, limit)
        gate = gate / (1 + torch.exp(-alpha * gate))
        if isinstance(activation, OtherGlu):
            gate, up = gate.clamp(max=limit) if after else gate, up + activation.up_offset
        rows = (gate * up) @ second.t()
        if biases is not None:
            rows += biases.down[expert].double()
        out.index_add_(0, tokens, rows * topk_weights[tokens, slots].double()[:, None])
    return out


def fresh_generator(device: torch.device | str = "cpu", seed: int | None = None) -> torch.Generator:
    """A generator with a fresh seed (or a given one, to repeat a failure), printed for pytest's report."""
    seed = secrets.randbits(32) if seed is None else seed
    print(f"seed {seed}")
    return torch.Generator(device).manual_seed(seed)


@contextmanager
def forbid_host_sync() -> Iterator[None]:
    """A context in which anything that makes the host wait for the GPU raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_contiguous(
    rows_per_group: Sequence[int],
    n: int,
    k: int,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    quantize: Callable[[Tensor], Weights] = quantize_blocks,
) -> ContiguousCase:
    """Random inputs with rows_per_group[g] rows in group g; seed None: a new one each time, printed.

    quantize  makes the weights
    """
    generator = fresh_generator(device, seed)
    x = random_rows((sum(rows_per_group), k), generator)
    w = random_weights(len(rows_per_group), n, k, generator)
    bounds = torch.tensor([0, *rows_per_group]).cumsum(0).to(torch.int32).to(device)
    return ContiguousCase(x, w, quantize_rows(x), quantize(w), bounds, tuple(rows_per_group))


def random_masked(
    counts: Sequence[int],
    max_m: int,
    n: int,
    k: int,
    device: torch.device | str = "cpu",
    seed: int | None = None,
    quantize: Callable[[Tensor], Weights] = quantize_blocks,
) -> MaskedCase:
    """Random inputs with counts[g] valid rows in group g; the rows past them hold NaN, data and scales."""
    generator = fresh_generator(device, seed)
    x = random_rows((len(counts), max_m, k), generator)
    for group, count in enumerate(counts):
        x[group, count:] = torch.nan
    w = random_weights(len(counts), n, k, generator)
    device_counts = torch.tensor(list(counts), dtype=torch.int32, device=device)
    return MaskedCase(x, w, quantize_rows(x), quantize(w), device_counts, tuple(counts))


def random_rows(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """bf16 normal numbers whose size varies from one row and block to the next, so that scales differ."""
    x = torch.randn(shape, dtype=torch.bfloat16, device=generator.device, generator=generator)
    blocks = x.view(*shape[:-1], shape[-1] // 128, 128)
    blocks *= _sizes((*shape[:-1], shape[-1] // 128, 1), generator)
    return x


def random_weights(num_groups: int, n: int, k: int, generator: torch.Generator) -> Tensor:
    """bf16 [G, N, K] of normal numbers whose size varies from one 128x128 block to the next."""
    w = torch.empty((num_groups, n, k), dtype=torch.bfloat16, device=generator.device)
    for weight in w:
        weight.normal_(generator=generator)
        for start in range(0, n, 128):
            blocks = weight[start : start + 128].view(-1, k // 128, 128)
            blocks *= _sizes((1, k // 128, 1), generator)
    return w


def poisoned(*shape: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(buffer, out): out, bf16 of the given shape, inside a buffer with guard rows around it; all poison."""
    rows = torch.Size(shape[:-1]).numel()
    buffer = torch.empty((rows + 2 * _GUARD_ROWS, shape[-1]), dtype=torch.bfloat16, device=device)
    buffer.view(torch.int16).fill_(_POISON)
    return buffer, buffer[_GUARD_ROWS : _GUARD_ROWS + rows].view(shape)


def untouched(rows: Tensor) -> bool:
    """Whether every element is still the poison, bit for bit."""
    return bool((rows.view(torch.int16) == _POISON).all().item())


def expect_contiguous(case: ContiguousCase, buffer: Tensor, out: Tensor) -> None:
    """Assert that out is correct by both measures and that the guard rows of its buffer are untouched.

    Four bits are too few to compare with unquantized weights.
    """
    _expect_guards(buffer, case.label)
    dequantized, unquantized = Diff(), Diff()
    rows = dequantize_rows(*case.a)
    for group, part in case.groups():
        weight = decode(mapped(case.b, itemgetter(group)))
        dequantized.add(out[part], _product(rows[part], weight))
        if isinstance(case.b, Quantized):
            unquantized.add(out[part], _product(case.x[part], case.w[group]))
    _expect_small(dequantized, unquantized, case.label)


def expect_masked(case: MaskedCase, buffer: Tensor, out: Tensor) -> None:
    """Assert that out is correct by both measures and that guard rows and rows past counts are untouched."""
    _expect_guards(buffer, case.label)
    dequantized, unquantized = Diff(), Diff()
    for group, count in enumerate(case.row_counts):
        assert untouched(out[group, count:]), f"group {group}: rows past {count} were written; {case.label}"
        if count:
            rows = dequantize_rows(case.a.data[group, :count], case.a.scales[group, :count])
            weight = decode(mapped(case.b, itemgetter(group)))
            dequantized.add(out[group, :count], _product(rows, weight))
            if isinstance(case.b, Quantized):
                unquantized.add(out[group, :count], _product(case.x[group, :count], case.w[group]))
    _expect_small(dequantized, unquantized, case.label)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x.reshape(-1), _CHUNK)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.double() @ weight.double().t()


def _sizes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, device=generator.device, generator=generator)
    return (0.5 + 1.5 * uniform).to(torch.bfloat16)


def _expect_guards(buffer: Tensor, label: str) -> None:
    assert untouched(buffer[:_GUARD_ROWS]), f"guard rows before out were written; {label}"
    assert untouched(buffer[-_GUARD_ROWS:]), f"guard rows after out were written; {label}"


def _expect_small(dequantized: Diff, unquantized: Diff, label: str) -> None:
    few = dequantized.elements < _FEW_OUTPUTS
    tolerance = UNQUANTIZED_TOLERANCE if few else DEQUANTIZED_TOLERANCE
    assert dequantized.value < tolerance, f"diff {dequantized.value:.3g}; {label}"
    if unquantized.elements >= _ENOUGH_OUTPUTS:
        assert unquantized.value < UNQUANTIZED_TOLERANCE, f"unquantized {unquantized.value:.3g}; {label}"


def _shorten(numbers: tuple[int, ...]) -> str:
    head = ", ".join(map(str, numbers[:8]))
    return f"[{head}, ... sum {sum(numbers)}]" if len(numbers) > 8 else f"[{head}]"
