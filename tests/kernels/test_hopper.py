"""The GEMMs of both GPU backends against float64 on fresh random data: awkward shapes, poisoned outputs."""

import math
import secrets
from functools import partial

import pytest
import torch

from expertd.kernels import Backend, Quantized, grouped_gemm_contiguous, grouped_gemm_masked, jit
from expertd.kernels.backends.hopper.plans import GemmPlan
from expertd.kernels.backends.hopper.tiles import CONFIGS, NORMAL, TileConfig
from expertd.kernels.backends.hopper.variants import VARIANTS
from tests.kernels.helpers import (
    expect_contiguous,
    expect_masked,
    poisoned,
    random_contiguous,
    random_masked,
)

pytestmark = pytest.mark.gpu
on_both = pytest.mark.parametrize("backend", ["hopper", "triton"])


def skewed(num_groups: int, total: int) -> list[int]:
    """Row counts with most rows in a few groups and none in many."""
    shares = torch.rand(num_groups, dtype=torch.float64).pow(8)
    return [int(x) for x in shares / shares.sum() * total]


def planned(config: TileConfig, tile_steps: int | None = None, tall_first: bool = False) -> Backend:
    """A backend whose GEMMs all run with this tile."""
    from expertd.kernels.backends.hopper.backend import HopperBackend

    plan = GemmPlan(config, 16 * config.steps if tile_steps is None else tile_steps, tall_first)
    return HopperBackend(choose=lambda *_: plan)


def run_contiguous(
    rows: list[int], n: int, k: int, num_sms: int | None = None, backend: Backend | str = "hopper"
) -> None:
    case = random_contiguous(rows, n, k, "cuda")
    buffer, out = poisoned(sum(rows), n, device="cuda")
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend, num_sms=num_sms)
    expect_contiguous(case, buffer, out)


def run_masked(
    counts: list[int],
    max_m: int,
    n: int,
    k: int,
    expected_m: int | None = None,
    backend: Backend | str = "hopper",
) -> None:
    case = random_masked(counts, max_m, n, k, "cuda")
    buffer, out = poisoned(len(counts), max_m, n, device="cuda")
    grouped_gemm_masked(case.a, case.b, case.counts, expected_m=expected_m, out=out, backend=backend)
    expect_masked(case, buffer, out)


@pytest.mark.parametrize("n", [8, 576, 1536, 7168])
@pytest.mark.parametrize("k", [128, 7168])
@on_both
def test_contiguous_sizes(n: int, k: int, backend: str) -> None:
    run_contiguous([3, 0, 130, 77, 1], n, k, backend=backend)
    run_contiguous([900, 300], n, k, backend=backend)


@pytest.mark.parametrize("n", [8, 576, 1536, 7168])
@pytest.mark.parametrize("k", [128, 7168])
@on_both
def test_masked_sizes(n: int, k: int, backend: str) -> None:
    run_masked([3, 0, 130, 77, 1], 130, n, k, expected_m=20, backend=backend)
    run_masked([3, 0, 130, 77, 1], 130, n, k, backend=backend)


@on_both
def test_all_groups_empty(backend: str) -> None:
    run_contiguous([0] * 7, 256, 256, backend=backend)
    run_masked([0] * 7, 5, 256, 256, backend=backend)


@on_both
def test_one_group_of_one_row(backend: str) -> None:
    run_contiguous([1], 512, 512, backend=backend)
    run_masked([1], 1, 512, 512, backend=backend)


@pytest.mark.parametrize("total", [300, 5000, 60000])
@on_both
def test_many_skewed_groups(total: int, backend: str) -> None:
    run_contiguous(skewed(256, total), 256, 256, backend=backend)


@on_both
def test_1024_groups(backend: str) -> None:
    run_contiguous(skewed(1024, 9000), 128, 128, backend=backend)
    run_masked([i % 3 for i in range(1024)], 2, 128, 128, backend=backend)


@pytest.mark.parametrize("first", range(1, 258, 32))
@on_both
def test_every_height(first: int, backend: str) -> None:
    """Heights 1 to 257; the groups before put starts on arbitrary rows, odd ones included."""
    heights = list(range(first, min(first + 32, 258)))
    run_contiguous(heights, 264, 256, backend=backend)
    run_contiguous([*heights, 5000], 264, 256, backend=backend)
    run_masked(heights, max(heights), 136, 256, backend=backend)
    run_masked(heights, max(heights), 136, 256, expected_m=8, backend=backend)


@on_both
def test_groups_start_at_odd_rows(backend: str) -> None:
    run_contiguous([1, 3, 5, 191, 193, 7, 63, 65], 384, 384, backend=backend)


@pytest.mark.parametrize("max_m", [1, 63, 65])
@on_both
def test_max_m(max_m: int, backend: str) -> None:
    run_masked([max_m, 0, max_m // 2, 1], max_m, 512, 384, backend=backend)
    run_masked([max_m] * 5, max_m, 512, 384, backend=backend)


@pytest.mark.parametrize("k", [512, 640])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_tile_on_the_same_rows(config: TileConfig, k: int) -> None:
    """Each variant is correct even on sizes for which another would be chosen; K blocks may go in pairs."""
    rows, backend = [0, 1, 64, 65, 191, 192, 193, 400, 1000], planned(config)
    run_contiguous(rows, 1160, k, backend=backend)
    run_masked(rows, 1000, 1160, k, backend=backend)


@pytest.mark.parametrize("tall_first", [False, True])
@pytest.mark.parametrize("tile_steps", [16, 23, 32, 41, 48])
def test_every_cut_covers_every_row(tile_steps: int, tall_first: bool) -> None:
    backend = planned(NORMAL, tile_steps, tall_first)
    run_contiguous([0, 1, 64, 65, 191, 192, 193, 400, 3000], 1160, 384, backend=backend)
    run_masked([700], 701, 520, 256, backend=backend)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_one_k_block_per_tile(config: TileConfig) -> None:
    """Every ring of the kernel is full of different tiles."""
    backend = planned(config)
    for num_sms in (2, 132):
        run_contiguous([1, 300, 0, 7000, 64], 2048, 128, num_sms, backend)


@on_both
def test_more_outputs_than_an_int_can_index(backend: str) -> None:
    """M * N exceeds 2**31: a 32-bit offset would write somewhere else."""
    n, k = 16384, 128
    rows = [70_000, 1, 62_000]
    assert sum(rows) * n > 2**31
    run_contiguous(rows, n, k, backend=backend)


@on_both
def test_a_group_of_more_tiles_than_floats_can_count(backend: str) -> None:
    """From 2**26 rows on, one tile of 64 rows too many was counted: an empty one, with which its CTA left."""
    rows, n, k = (2**20 + 6) * 64 + 1, 136, 128
    ones = partial(torch.full, fill_value=0x38, dtype=torch.uint8, device="cuda")  # 1.0 in e4m3
    a = Quantized(ones((1, rows, k)).view(torch.float8_e4m3fn), torch.ones(1, 1, rows, device="cuda").mT)
    b = Quantized(ones((1, n, k)).view(torch.float8_e4m3fn), torch.ones(1, 2, 1, device="cuda"))
    counts = torch.tensor([rows], dtype=torch.int32, device="cuda")
    out = torch.full((1, rows, n), math.nan, dtype=torch.bfloat16, device="cuda")
    grouped_gemm_masked(a, b, counts, expected_m=60, out=out, backend=backend, num_sms=1)
    parts = (out[0, first : first + 2**22] for first in range(0, rows, 2**22))  # a mask of all takes 9 GB
    assert sum(int((part != k).sum()) for part in parts) == 0


@on_both
def test_row_major_scales(backend: str) -> None:
    case = random_contiguous([40, 300, 5], 512, 1024, "cuda")
    column_major = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    scales = case.a.scales.contiguous()
    assert scales.stride() != case.a.scales.stride()
    row_major = grouped_gemm_contiguous(Quantized(case.a.data, scales), case.b, case.offsets, backend=backend)
    assert torch.equal(column_major, row_major)


@pytest.mark.parametrize("num_sms", [1, 2, 3, 20, 66, 131, 132, 1000])
@on_both
def test_any_sm_count_gives_the_same_bits(num_sms: int, backend: str) -> None:
    case = random_contiguous([40, 300, 0, 5, 700], 640, 512, "cuda", seed=num_sms)
    every = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    some = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend, num_sms=num_sms)
    assert torch.equal(every, some)


@on_both
def test_layouts_and_tiles_give_the_same_bits(backend: str) -> None:
    """A row's result depends only on the row and the weight, not on layout, tile or neighbors."""
    counts, max_m = [17, 64, 33], 64
    case = random_masked(counts, max_m, 512, 1024, "cuda")
    short = grouped_gemm_masked(case.a, case.b, case.counts, expected_m=8, backend=backend)
    tall = grouped_gemm_masked(case.a, case.b, case.counts, expected_m=max_m, backend=backend)
    data = torch.cat([case.a.data.view(torch.uint8)[g, :c] for g, c in enumerate(counts)])
    scales = torch.cat([case.a.scales[g, :c] for g, c in enumerate(counts)])
    offsets = torch.tensor([0, 17, 81, 114], dtype=torch.int32, device="cuda")
    packed = grouped_gemm_contiguous(
        Quantized(data.view(torch.float8_e4m3fn), scales), case.b, offsets, backend=backend
    )
    for g, count in enumerate(counts):
        assert torch.equal(short[g, :count], tall[g, :count])
        assert torch.equal(short[g, :count], packed[offsets[g] : offsets[g] + count])


@pytest.mark.parametrize("rows", [[700, 1300, 2], [9, 0, 30, 4]])
@on_both
def test_ten_runs_give_the_same_bits(rows: list[int], backend: str) -> None:
    case = random_contiguous(rows, 1536, 2048, "cuda")
    first = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    for _ in range(10):
        _, out = poisoned(sum(rows), 1536, device="cuda")
        grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend)
        assert torch.equal(first, out)


@on_both
def test_nan_stays_in_its_row(backend: str) -> None:
    case = random_contiguous([40, 300], 512, 512, "cuda")
    clean = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    spoiled = case.a.scales.clone(memory_format=torch.preserve_format)
    spoiled[39] = math.nan
    out = grouped_gemm_contiguous(Quantized(case.a.data, spoiled), case.b, case.offsets, backend=backend)
    assert out[39].isnan().all()
    keep = torch.arange(340, device="cuda") != 39
    assert torch.equal(out[keep], clean[keep])


@on_both
def test_captured_in_a_cuda_graph_with_counts_changed_later(backend: str) -> None:
    case = random_masked([20, 3, 0, 64], 64, 512, 512, "cuda")
    _, out = poisoned(4, 64, 512, device="cuda")
    counts = torch.zeros_like(case.counts)
    grouped_gemm_masked(case.a, case.b, counts, out=out, backend=backend)  # compiles, makes descriptors
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm_masked(case.a, case.b, counts, out=out, backend=backend)
    counts.copy_(case.counts)
    buffer, fresh = poisoned(4, 64, 512, device="cuda")
    out.copy_(fresh)
    graph.replay()
    fresh.copy_(out)
    expect_masked(case, buffer, fresh)


@on_both
def test_other_streams(backend: str) -> None:
    case = random_contiguous([40, 300], 512, 512, "cuda")
    expected = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    stream.synchronize()
    assert torch.equal(expected, out)


@on_both
def test_random_problems(backend: str) -> None:
    """Twenty problems of random sizes."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(20):
        groups, n, k = draw(1, 40), 8 * draw(1, 100), 128 * draw(1, 12)
        rows = [draw(0, draw(1, 400)) for _ in range(groups)]
        run_contiguous(rows, n, k, backend=backend)
        run_masked(rows, max(1, *rows), n, k, expected_m=draw(1, 300), backend=backend)


def test_every_compilation_reports_its_resources() -> None:
    """With a driver, NVRTC has a cache of its own; binaries from there come without a report."""
    source = VARIANTS[0].source
    assert jit.compile_source(source).usage == jit.compile_source(source).usage
