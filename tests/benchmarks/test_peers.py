"""The peers of the grouped GEMM benchmark, as far as they can be tried without a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.gemm import grouped_gemm
from benchmarks.gemm.problem import Problem
from benchmarks.gemm.shapes import Shape
from benchmarks.layer.moe_layer import difference
from benchmarks.lib.markdown import NOT_MEASURED
from benchmarks.peers import Peer, cutlass, torch_gemms
from benchmarks.peers.peer import packed
from benchmarks.report import SECTIONS
from expertd.layout import Layout
from tests.kernels.helpers import random_contiguous, random_masked

ROWS, N, K = (5, 0, 130), 256, 384


def contiguous() -> Problem:
    case = random_contiguous(ROWS, N, K)
    out = torch.empty(sum(ROWS), N, dtype=torch.bfloat16)
    return Problem(Shape("", Layout.CONTIGUOUS, ROWS, N, K), case.a, case.b, case.offsets, out)


def masked() -> Problem:
    case = random_masked(ROWS, 256, N, K)
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


def grouped_mm(*arguments: Tensor) -> None:
    """What CUTLASS's function computes, from the arguments that its kernels read."""
    out, *pointers, a, b, a_scales, b_scales = arguments[:10]
    a_strides, b_strides, c_strides, *layouts, sizes, starts, workspace = arguments[10:]
    assert [pointer.dtype for pointer in pointers] == [torch.int64] * 5
    assert [(tuple(layout.shape), layout.dtype) for layout in layouts] == [((3, 5), torch.int32)] * 2
    assert workspace.dtype == torch.uint8
    assert (a_strides.tolist(), b_strides.tolist(), c_strides.tolist()) == ([K] * 3, [K] * 3, [N] * 3)
    assert b.stride() == (N * K, 1, K)  # weights are read as [G, N, K] from their address
    for g, ((m, n, k), start) in enumerate(zip(sizes.tolist(), starts.tolist(), strict=True)):
        rows = slice(start, start + m)
        x = a[rows].double().view(m, k // 128, 128) * a_scales[rows, :, None]
        scales = b_scales[g].t().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        out[rows] = (x.view(m, k) @ (b[g].t().double() * scales).t()).bfloat16()


@PROBLEMS
def test_cutlass_gets_its_arguments(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(fp8_blockwise_scaled_grouped_mm=grouped_mm)
    monkeypatch.setattr(torch.ops, "sgl_kernel", ops, raising=False)
    problem = make()
    call, result = cutlass.prepare(problem)
    call()
    assert difference(problem.real_rows(problem.run()), result()) < 1e-5


@PROBLEMS
def test_torch_gets_the_rows_and_weights(make: Any) -> None:
    problem = make()
    call, result = torch_gemms.prepare_bf16(problem)
    call()
    rows, wanted = packed(problem).data.double(), []
    for group, part in zip(problem.b.data.double(), torch.split(rows, list(ROWS)), strict=True):
        wanted.append(part @ group.t())
    assert difference(result(), torch.cat(wanted)) < 1e-5


def test_torchs_scales_are_one_for_each_row_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *a, **_: given.extend(a))
    problem = contiguous()
    torch_gemms.prepare_rowwise(problem)[0]()
    a, b, a_scales, b_scales, ends = given
    assert [tuple(x.shape) for x in (a, b, a_scales, b_scales)] == [(135, K), (3, K, N), (135,), (3, N)]
    assert torch.equal(b_scales[:, 200], problem.b.scales[:, 1, 0])
    assert ends.tolist() == [5, 5, 135]


def test_a_missing_peer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass, "find_spec", lambda _: None)
    cutlass.available.cache_clear()
    assert [peer.name for peer in peers.available_peers()] == ["torch FP8, scales of rows", "torch bf16"]


def test_a_library_that_does_not_load_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "common_ops.abi3.so").write_text("no library")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(cutlass, "find_spec", lambda _: spec)
    cutlass.available.cache_clear()
    assert not cutlass.available()


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


def test_peers_in_the_documents(tmp_path: Path) -> None:
    rows = [
        {"band": "large", "us": 10.0, "peers_us": {"A": 20.0, "B": 5.0}},
        {"band": "large", "us": 10.0, "peers_us": {"A": 5.0}},
        {"band": "small", "us": 10.0},
    ]
    (tmp_path / "grouped_gemm-h200.json").write_text(json.dumps({"rows": rows}))
    assert SECTIONS["grouped-gemm-peers"](tmp_path).splitlines() == [
        "| speed over | A | B |",
        "|---|---|---|",
        "| large | 1.00 (0.50 to 2.00) | 0.50 (0.50 to 0.50) |",
        "| small |  |  |",
    ]
    (tmp_path / "grouped_gemm-h200.json").write_text(json.dumps({"rows": rows[2:]}))
    assert SECTIONS["grouped-gemm-peers"](tmp_path) == NOT_MEASURED
