"""The peers of the grouped GEMM benchmark, as far as they can be tried without a GPU."""

from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks.gemm import grouped_gemm
from benchmarks.gemm.problem import Problem
from benchmarks.gemm.shapes import Shape
from benchmarks.layer.moe_layer import difference
from benchmarks.peers import Peer, cutlass, torch_gemms
from benchmarks.peers.peer import packed
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


@PROBLEMS
def test_torch_gets_the_rows_and_weights(make: Any) -> None:
    problem = make()
    call, result = torch_gemms.prepare_bf16(problem)
    call()
    rows, wanted = packed(problem).data.double(), []
    for group, part in zip(problem.b.data.double(), torch.split(rows, list(ROWS)), strict=True):
        wanted.append(part @ group.t())
    assert difference(result(), torch.cat(wanted)) < 1e-5


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
