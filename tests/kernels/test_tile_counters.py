"""Tile counters on the device: no launch sees another's counter, and each leaves zeros."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import grouped_gemm_contiguous, resolve_backend
from expertd.kernels.backends.hopper import tile_counters
from expertd.kernels.backends.hopper.backend import HopperBackend
from expertd.kernels.backends.hopper.tile_counters import TileCounters
from tests.kernels.helpers import ContiguousCase, random_contiguous

ROWS, N, K = [700, 3, 0, 1900, 64], 2048, 256


def run(case: ContiguousCase, out: Tensor | None = None) -> Tensor:
    return grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend="hopper")


def cases(count: int) -> list[ContiguousCase]:
    return [random_contiguous(ROWS, N, K, "cuda", seed=seed) for seed in range(count)]


def test_without_counters_left_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    counters = TileCounters()
    counters._free[0] = iter([64])
    assert [counters.get(0, stream=7), counters.get(0, stream=7)] == [64, 64]
    with pytest.raises(RuntimeError, match="at most 131072 streams and captured graphs"):
        counters.get(0, stream=8)


def test_a_captured_graph_has_counters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {7: 1, 8: 1}  # two streams captured into one graph
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(tile_counters, "_capture_id", numbers.__getitem__)
    counters = TileCounters()
    counters._free[0] = iter(range(64, 128, 8))
    one = [counters.get(0, stream=stream) for stream in (7, 7, 8)]
    numbers[7] = 2  # the stream's next graph
    assert [*one, counters.get(0, stream=7), counters.get(0, stream=8)] == [64, 64, 72, 80, 72]


def test_the_first_use_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"warm_up\(\) or a call before a CUDA graph is captured"):
        TileCounters().prepare(0)


def test_two_first_uses_at_once_share_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second slab would replace that which launches of the first use."""
    both, made, zeros = Barrier(2), list[Tensor](), torch.zeros

    def none_is_capturing() -> bool:
        both.wait(60)  # both threads have found no counters
        return False

    def on_the_host(*size: int, device: str, **given: Any) -> Tensor:
        assert device == "cuda:0"
        made.append(zeros(*size, **given))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", none_is_capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", on_the_host)
    counters = TileCounters()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(counters.prepare, [0, 0]))
    assert len(made) == 1
    assert counters._slabs[0] is made[0]
    assert next(counters._free[0]) == made[0].data_ptr()


@pytest.mark.gpu
def test_launches_leave_zeros() -> None:
    for case in cases(3):
        run(case)
    torch.cuda.synchronize()
    backend = resolve_backend("hopper")
    assert isinstance(backend, HopperBackend)
    assert not backend._gemm.tile_counters._slabs[torch.cuda.current_device()].any()


@pytest.mark.gpu
def test_repeated_captures_use_few_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases(1)[0]
    run(case)
    backend = resolve_backend("hopper")
    assert isinstance(backend, HopperBackend)
    counters, device = backend._gemm.tile_counters, torch.cuda.current_device()
    pairs = counters._slabs[device].data_ptr() + 8 * (tile_counters.COUNTERS - 3)
    monkeypatch.setitem(counters._free, device, iter(range(pairs, pairs + 24, 8)))
    out = torch.empty(sum(ROWS), N, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for _ in range(5):
                run(case, out)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.zero_()  # torch warns about an empty graph
        with pytest.raises(RuntimeError, match="captured graphs"):
            run(case, out)


@pytest.mark.gpu
def test_concurrent_streams() -> None:
    problems = cases(4)
    expected = [run(case) for case in problems]
    outs = [torch.zeros_like(out) for out in expected]
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(50):
        for case, out, stream in zip(problems, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                run(case, out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@pytest.mark.gpu
def test_concurrent_graphs() -> None:
    problems = cases(4)
    expected = [run(case) for case in problems]
    outs = [torch.zeros_like(out) for out in expected]
    graphs = []
    for case, out in zip(problems, outs, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            run(case, out)
            run(case, out)
    streams = [torch.cuda.Stream() for _ in problems]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))
