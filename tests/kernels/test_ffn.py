"""The grouped FFN on a CPU against float64, by the backend's own way and by the composition of GEMMs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import Backend, Quantized, dequantize_blocks, grouped_ffn, quantize_blocks
from kernels.backends import cpu_ffn, matrices
from kernels.backends.reference import ReferenceBackend
from tests.kernels.helpers import diff, fresh_generator, random_rows, random_weights

# What rounding hidden states and activations cost in 610 draws of 1 to 1025 rows, as a `diff`: to bf16
# 1.2e-5 on average and 3.2e-5 at most, to FP8 1.0e-3 and, in 1360 draws, 3.0e-3.
BF16_TOLERANCE = 2e-4
FP8_TOLERANCE = 1e-2

H, I = 256, 128  # noqa: E741


@dataclass(frozen=True)
class Case:
    """Arguments of `grouped_ffn`; rows_per_group on the host."""

    hidden_states: Tensor
    tokens: Tensor
    gate_up: Quantized
    down: Quantized
    offsets: Tensor
    rows_per_group: Sequence[int]

    def arguments(self) -> tuple[Tensor, Tensor, Quantized, Quantized, Tensor]:
        return self.hidden_states, self.tokens, self.gate_up, self.down, self.offsets

    def run(self, backend: Backend | None = None) -> Tensor:
        return grouped_ffn(*self.arguments(), backend=backend or ReferenceBackend())

    def expected(self) -> Tensor:
        """float64 [rows that have a group, H]."""
        starts = torch.tensor([0, *self.rows_per_group]).cumsum(0)
        return torch.cat([self._expert(g, self.tokens[s:e]) for g, (s, e) in enumerate(_pairs(starts))])

    def _expert(self, group: int, tokens: Tensor) -> Tensor:
        gate_up, down = (
            dequantize_blocks(w.data[group], w.scales[group]).double() for w in (self.gate_up, self.down)
        )
        gate, up = (self.hidden_states[tokens].double() @ gate_up.t()).chunk(2, dim=1)
        return (gate / (1 + torch.exp(-gate)) * up) @ down.t()


def _pairs(bounds: Tensor) -> Iterator[tuple[int, int]]:
    return zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)


def _case(
    rows_per_group: Sequence[int],
    *,
    spare_rows: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    h: int = H,
    i: int = I,
    seed: int | None = None,
) -> Case:
    """Random arguments; spare_rows after the last group's belong to none."""
    generator = fresh_generator(seed=seed)
    rows, num_groups = sum(rows_per_group), len(rows_per_group)
    num_tokens = max(1, rows // 3)
    tokens = torch.randint(num_tokens, (rows + spare_rows,), generator=generator)
    gate_up = quantize_blocks(random_weights(num_groups, 2 * i, h, generator) * h**-0.5)
    down = quantize_blocks(random_weights(num_groups, h, i, generator) * i**-0.5)
    offsets = torch.tensor([0, *rows_per_group]).cumsum(0).to(torch.int32)
    hidden_states = random_rows((num_tokens, h), generator).to(dtype)
    return Case(hidden_states, tokens, gate_up, down, offsets, rows_per_group)


def _by_default(case: Case) -> Tensor:
    return Backend.ffn(ReferenceBackend(), *case.arguments(), None)


ROWS = [
    [1],
    [0, 3, 0],
    [16, 0, 17, 15],
    [15, 0, 1],
    [20, 1],  # the first one's GEMM needs rows past the last
    [1] * 40,
    [255, 1, 256, 300],  # runs end between groups
    [700, 5],  # and inside of one
    [0, 0, 1025],
]


@pytest.mark.parametrize("rows", ROWS)
def test_reference_is_right(rows: list[int]) -> None:
    case = _case(rows)
    out = case.run()
    assert out.dtype == torch.bfloat16
    assert diff(out, case.expected()) < BF16_TOLERANCE


@pytest.mark.parametrize("rows", ROWS)
def test_default_is_right(rows: list[int]) -> None:
    case = _case(rows)
    out = _by_default(case)
    assert out.dtype == torch.bfloat16
    assert diff(out, case.expected()) < FP8_TOLERANCE


@pytest.mark.parametrize("h", [128, 384])
@pytest.mark.parametrize("i", [128, 640])
def test_sizes(h: int, i: int) -> None:
    case = _case([3, 0, 20], h=h, i=i)
    assert diff(case.run(), case.expected()) < BF16_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    case = _case([5, 30], dtype=dtype)
    assert diff(case.run(), case.expected()) < BF16_TOLERANCE


def test_hidden_states_may_have_any_strides() -> None:
    case = _case([5, 30])
    strided = Case(case.hidden_states.t().contiguous().t(), *case.arguments()[1:], case.rows_per_group)
    assert torch.equal(strided.run(), case.run())


@pytest.mark.parametrize("run", [Case.run, _by_default])
@pytest.mark.parametrize("rows", [[0, 0], [4, 20], [300, 0, 2]])
def test_rows_past_the_last_group_are_left_alone(rows: list[int], run: Callable[[Case], Tensor]) -> None:
    case = _case(rows, spare_rows=7)
    out = run(case)
    assert out.shape == (sum(rows) + 7, H)
    if sum(rows):
        assert diff(out[:-7], case.expected()) < FP8_TOLERANCE


def test_no_rows_give_nothing() -> None:
    case = _case([0, 0, 0])
    assert case.run().shape == (0, H)
    nothing = Case(case.hidden_states[:0], *case.arguments()[1:], case.rows_per_group)
    assert nothing.run().shape == (0, H)


def test_a_bad_token_stays_in_its_own_rows() -> None:
    case = _case([5, 0, 40, 300])
    clean = case.run()
    case.hidden_states[2, 100] = torch.nan
    out, bad = case.run(), case.tokens == 2
    assert bad.any()
    assert out[bad].isnan().all()
    assert torch.equal(out[~bad], clean[~bad])


def test_a_row_does_not_depend_on_its_company() -> None:
    case = _case([5, 0, 40, 300])
    together = case.run()
    for row, offsets in ((4, [0, 1, 1, 1, 1]), (44, [0, 0, 0, 1, 1]), (200, [0, 0, 0, 0, 1])):
        alone = grouped_ffn(
            case.hidden_states, case.tokens[row : row + 1], case.gate_up, case.down,
            torch.tensor(offsets, dtype=torch.int32), backend="reference",
        )  # fmt: skip
        assert diff(alone[0], together[row]) < BF16_TOLERANCE


def test_without_packing_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case([1, 40, 0, 300])
    out = case.run()
    monkeypatch.setattr(matrices, "can_pack", lambda: False)
    backend = ReferenceBackend()
    plain = case.run(backend)
    assert not any(matrix.is_mkldnn for matrix in backend._weights.get(*case.gate_up))
    assert diff(plain, out) < BF16_TOLERANCE
    assert diff(plain, case.expected()) < BF16_TOLERANCE


def test_weights_written_to_are_seen() -> None:
    case, backend = _case([4, 4]), ReferenceBackend()
    before = case.run(backend)
    case.down.scales.mul_(2)
    assert torch.equal(case.run(backend), 2 * before)
    case.gate_up.data.copy_(quantize_blocks(torch.zeros(2, 2 * I, H)).data)
    assert not case.run(backend).any()


def test_it_works_in_inference_mode_and_after() -> None:
    case, backend = _case([4, 20]), ReferenceBackend()
    with torch.inference_mode():
        inside = case.run(backend)
    case.hidden_states.requires_grad_()
    outside = case.run(backend)
    assert not outside.requires_grad
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("step", [1, 16])
@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 5, 5, 17], [0, 512, 1025, 1026], [0, 100, 5000, 5300]])
def test_runs_cover_each_row_once(bounds: list[int], step: int) -> None:
    pieces = [piece for run in cpu_ffn._runs(bounds, step) for piece in run]
    rows = [row for piece in pieces for row in range(piece.start, piece.end)]
    assert rows == list(range(bounds[-1]))
    for piece in pieces:
        assert bounds[piece.group] <= piece.start < piece.end <= bounds[piece.group + 1]
        assert 0 <= piece.padded_end - piece.end < step
        assert (piece.padded_end - piece.start) % step == 0
        assert piece.end - piece.start <= 512


def _e4m3(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_states": torch.zeros(4)}, r"hidden_states shape: expected 2 dimensions \[T, H\], got \(4,\)"),
    ({"hidden_states": torch.zeros(4, 256).double()}, "hidden_states dtype: expected torch.bfloat16 or .*64"),
    ({"hidden_states": torch.zeros(4, 200)}, "H: expected a multiple of 128, at least 128, got 200"),
    ({"hidden_states": torch.zeros(4, 128)}, r"gate_up shape: expected \(2, 256, 128\), got \(2, 256, 256\)"),
    ({"hidden_states": _meta(4, 256)}, "gate_up device: expected meta as hidden_states, got cpu"),
    ({"tokens": torch.zeros(4, 2).long()}, r"tokens shape: expected 1 dimensions \[R\], got \(4, 2\)"),
    ({"tokens": torch.zeros(8).int()}, "tokens dtype: expected torch.int64, got torch.int32"),
    ({"tokens": torch.zeros(16).long()[::2]}, r"tokens strides: expected contiguous, got \(2,\)"),
    ({"down": (_e4m3(256, 128), torch.ones(2, 1))}, r"down shape: expected 3 dimensions \[G, H, I\], got"),
    (
        {"down": (_e4m3(2, 256, 64), torch.ones(2, 2, 1))},
        "I: expected a multiple of 128, at least .*, got 64",
    ),
    ({"down": (_e4m3(0, 256, 128), torch.ones(0, 2, 1))}, "down groups: expected 1 to 1024, got 0"),
    ({"down": (_e4m3(2, 384, 128), torch.ones(2, 3, 1))}, r"down shape: expected \(2, 256, 128\), got"),
    (
        {"down": (_e4m3(2, 256, 128), torch.ones(2, 1))},
        r"down scales shape: expected \(2, 2, 1\), got \(2, 1\)",
    ),
    ({"gate_up": (_e4m3(2, 512, 256), torch.ones(2, 4, 2))}, r"gate_up shape: expected \(2, 256, 256\), got"),
    ({"gate_up": (torch.zeros(2, 256, 256), torch.ones(2, 2, 2))}, "gate_up dtype: expected .*e4m3fn, got"),
    ({"gate_up": (_e4m3(2, 256, 256).mT, torch.ones(2, 2, 2))}, "gate_up strides: expected contiguous, got"),
    (
        {"gate_up": (_e4m3(2, 256, 256), torch.ones(2, 2, 2).half())},
        "gate_up scales dtype: expected .*32, got",
    ),
    (
        {"gate_up": (_e4m3(2, 256, 256), torch.ones(2, 2, 2).mT)},
        "gate_up scales strides: expected contiguous",
    ),
    (
        {"gate_up": (_e4m3(2, 256, 256), _meta(2, 2, 2))},
        "gate_up scales device: expected cpu as hidden_states",
    ),
    ({"offsets": torch.zeros(2).int()}, r"offsets shape: expected \(3,\), got \(2,\)"),
    ({"offsets": torch.zeros(3).long()}, "offsets dtype: expected torch.int32, got torch.int64"),
    ({"offsets": _meta(3, dtype=torch.int32)}, "offsets device: expected cpu as hidden_states, got meta"),
    ({"num_sms": 0}, "num_sms: expected None or at least 1, got 0"),
    ({"backend": "metal"}, r"backend: expected one of .*'hopper', 'reference'.*, got 'metal'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden_states": torch.zeros(4, 256),
        "tokens": torch.zeros(8, dtype=torch.int64),
        "gate_up": Quantized(_e4m3(2, 256, 256), torch.ones(2, 2, 2)),
        "down": Quantized(_e4m3(2, 256, 128), torch.ones(2, 2, 1)),
        "offsets": torch.tensor([0, 3, 8], dtype=torch.int32),
        "backend": "reference",
    }
    with pytest.raises(ValueError, match=message):
        grouped_ffn(**(arguments | change))


def test_a_backend_of_another_device_is_refused() -> None:
    class OnlyCuda(ReferenceBackend):
        device_type = "cuda"

    with pytest.raises(
        ValueError, match="hidden_states device: expected cuda for backend 'reference', got cpu"
    ):
        _case([1]).run(OnlyCuda())
