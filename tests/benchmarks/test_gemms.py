"""The benchmarks of GEMMs without a GPU: which shapes count as slower, watts and energy, and the peers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks.gemm import compare, grouped_gemm, power
from benchmarks.gemm.power import Figures
from benchmarks.gemm.problem import Problem
from benchmarks.gemm.shapes import Shape, all_shapes, even_shapes
from benchmarks.layer.moe_layer import difference
from benchmarks.lib.nvml import Sample, mean_watts
from benchmarks.peers import Peer, cutlass, torch_gemms
from benchmarks.peers.peer import packed
from expertd.kernels import Quantized
from expertd.kernels.backends.hopper.packed_weights import unpack_mxfp4
from expertd.layout import Layout
from tests.kernels.helpers import random_contiguous, random_masked

Row = dict[str, Any]


def row(us: float, theirs: float | None = None, shape: str = "a", rows: tuple[int, ...] = (3, 4)) -> Row:
    peer = {"deep_gemm_us": theirs, "speed": theirs / us} if theirs else {}
    return {"shape": shape, "rows": list(rows), "us": us} | peer


def committed(tmp_path: Path, rows: list[Row]) -> dict[compare.Key, Row]:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"about": {}, "rows": rows}))
    return compare.committed(file)


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (row(104), row(100), False),
        (row(106), row(100), True),
        (row(90), row(100), False),
        (row(106, 100), row(100, 100), True),
        (row(106, 106), row(100, 100), False),  # a slower card
        (row(100, 90), row(100, 100), False),  # only DeepGEMM's time differs
        (row(106, 100), row(100), True),  # no DeepGEMM there: the time alone
    ],
)
def test_slower_is_more_than_noise_in_time_and_speed(now: Row, before: Row, expected: bool) -> None:
    assert compare.is_slower(now, before) == expected


def sequence(*rows: Row) -> tuple[Callable[[int], Row], list[int]]:
    """A function that measures again with these results, and the indices it was asked for."""
    left, asked = list(rows), []

    def again(index: int) -> Row:
        asked.append(index)
        return left.pop(0)

    return again, asked


def test_a_shape_is_slower_if_every_measurement_is(tmp_path: Path) -> None:
    before = committed(tmp_path, [row(50, shape="b"), row(100)])
    again, asked = sequence(row(112), row(109))
    found = compare.slower_rows([row(50, shape="b"), row(110)], before, again)
    assert [(now["us"], old["us"]) for now, old in found] == [(109, 100)]
    assert asked == [1, 1]


def test_the_better_time_of_each_side_counts(tmp_path: Path) -> None:
    """Ours is slower in both; DeepGEMM was slow too only the first time."""
    again, _ = sequence(row(112, 100), row(112, 104))
    found = compare.slower_rows([row(110, 110)], committed(tmp_path, [row(100, 100)]), again)
    assert found == []  # 110 against 110: this card looked slower, and was not measured again
    again, _ = sequence(row(109, 100), row(112, 104))
    ((now, _),) = compare.slower_rows([row(110, 102)], committed(tmp_path, [row(100, 100)]), again)
    assert (now["us"], now["deep_gemm_us"], now["speed"]) == (109, 100, 100 / 109)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": [1]}'])
def test_another_file_is_refused_in_a_sentence(content: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    with pytest.raises(SystemExit, match=r"--compare: .*expected a result of benchmarks grouped_gemm, got"):
        grouped_gemm.committed_rows(file, all_shapes())
    with pytest.raises(SystemExit, match=r"--compare: .*No such file"):
        grouped_gemm.committed_rows(tmp_path / "none.json", all_shapes())


def test_power_is_counted_between_changes_of_the_counter() -> None:
    """The counter moves at 0.1, 0.2 and 0.4 s; what is before and after has no known energy."""
    joules = {0.0: 50, 0.05: 50, 0.1: 90, 0.15: 90, 0.2: 150, 0.4: 300, 0.45: 300}
    samples = [Sample(seconds, value, 1.0, 1.0) for seconds, value in joules.items()]
    assert mean_watts(samples) == pytest.approx((300 - 90) / 0.3)


def test_an_operations_energy() -> None:
    """690 W for 1631 us and 1.928e12 operations: DeepGEMM's large shape."""
    flops = 2 * 4 * 8212 * 4096 * 7168
    entry = power.entry(Figures(1631, 690, 1316), flops)
    assert entry["pj_per_flop"] == pytest.approx(690 * 1631e-6 / flops * 1e12)
    assert 0.58 < entry["pj_per_flop"] < 0.59


def test_the_fills_energy_is_left_out() -> None:
    entry = power.entry(Figures(500, 600, 1500), 10**9, around=Figures(200, 450, 1900))
    assert (entry["us"], entry["watts"], entry["mhz"]) == (300, 600, 1500)
    assert entry["pj_per_flop"] == pytest.approx((500 * 600 - 200 * 450) * 1e-6 / 1e9 * 1e12)


ROWS, N, K = (5, 0, 130), 256, 384


def contiguous() -> Problem:
    case = random_contiguous(ROWS, N, K)
    assert isinstance(case.b, Quantized)
    out = torch.empty(sum(ROWS), N, dtype=torch.bfloat16)
    return Problem(Shape("", Layout.CONTIGUOUS, ROWS, N, K), case.a, case.b, case.offsets, out)


def masked() -> Problem:
    case = random_masked(ROWS, 256, N, K)
    assert isinstance(case.b, Quantized)
    out = torch.empty(len(ROWS), 256, N, dtype=torch.bfloat16)
    return Problem(Shape("", Layout.MASKED, ROWS, N, K, 256), case.a, case.b, case.counts, out)


PROBLEMS = pytest.mark.parametrize("make", [contiguous, masked])


@PROBLEMS
def test_peers_get_the_real_rows(make: Any) -> None:
    problem = make()
    rows = packed(problem)
    assert rows.ends.tolist() == [5, 5, 135]
    assert rows.ends.dtype == torch.int32
    assert rows.data.shape == (135, K)
    assert rows.scales.shape == (135, K // 128)
    assert rows.scales.is_contiguous()
    last = problem.a.data[134] if make is contiguous else problem.a.data[2, 129]
    assert torch.equal(rows.data[134].view(torch.uint8), last.view(torch.uint8))


@PROBLEMS
def test_torch_gets_the_rows_and_weights(make: Any) -> None:
    problem = make()
    call, result = torch_gemms.prepare_bf16(problem)
    call()
    rows, wanted = packed(problem).data.double(), []
    for group, part in zip(problem.b.data.double(), torch.split(rows, list(ROWS)), strict=True):
        wanted.append(part @ group.t())
    assert difference(result(), torch.cat(wanted)) < 1e-5


@PROBLEMS
def test_mxfp4_is_measured_beside_the_same_numbers_in_fp8(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, times = make(), iter([30.0, 20.0])
    monkeypatch.setattr(grouped_gemm, "kernel_microseconds", lambda call, kernel: (call(), next(times))[1])
    row = grouped_gemm.measure_mxfp4(problem, 4.0)
    assert (row["format"], row["fp8_us"], row["us"], row["speed"]) == ("MXFP4", 30, 20, 1.5)
    active = 2 * N * K * (1 / 2 + 1 / 32)  # of two groups with rows
    assert row["tbps"] == pytest.approx((active + sum(ROWS) * (K + K // 128 * 4 + N * 2)) / 20 / 1e6)
    table = grouped_gemm.by_weights([{"band": "each 5", "weights": row}])
    assert table.splitlines()[-1].startswith("| each 5 | 1 | 1.50 | ")


def test_mxfp4_with_other_bits_is_not_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm, "kernel_microseconds", lambda call, kernel: 1.0)
    wrong = lambda packed, k: unpack_mxfp4(packed._replace(scales=packed.scales * 2), k)  # noqa: E731
    monkeypatch.setattr(grouped_gemm, "unpack_mxfp4", wrong)
    with pytest.raises(SystemExit, match="expected the bits of FP8 weights from MXFP4, got others"):
        grouped_gemm.measure_mxfp4(contiguous(), 4.0)


def test_even_shapes_fit_both_formats() -> None:
    """A name of a band picks them alone, and K has whole blocks."""
    shapes = even_shapes()
    assert not any("each" in shape.band for shape in all_shapes())
    assert all(len(set(shape.rows)) == 1 and shape.k % 128 == 0 for shape in shapes)
    assert all(shape.bytes_with(grouped_gemm.FOUR_BITS["mxfp4"]) < shape.bytes for shape in shapes)


def test_a_missing_peer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass, "find_spec", lambda _: None)
    cutlass.available.cache_clear()
    assert [peer.name for peer in peers.available_peers()] == ["torch FP8, scales of rows", "torch bf16"]


def test_a_peer_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = contiguous()
    right = (lambda: None, problem.run)
    wrong = (lambda: None, lambda: problem.run() * 2)

    def refuse(problem: Problem) -> Any:
        raise ValueError("no such shape\nat line 1")

    def peer(name: str, prepare: Any, same: bool = True) -> Peer:
        return Peer(name, name, same, lambda: True, prepare)

    others = [
        peer("right", lambda _: right), peer("wrong", lambda _: wrong), peer("refusing", refuse),
        peer("other arithmetic", lambda _: wrong, same=False),
    ]  # fmt: skip
    monkeypatch.setattr(grouped_gemm, "kernel_microseconds", lambda call, kernel: len(kernel))
    assert grouped_gemm.measure_peers(problem, others) == {"right": 5, "other arithmetic": 16}
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(problem.shape.label)]
    assert "wrong: output: expected less than 0.0001 from ours, got 2.0e-01" in said[0]
    assert "refusing: no such shape" in said[1]
