"""The tiles of the GEMM: host and device agree on each, and the plans for given shapes are fixed."""

from dataclasses import replace

import pytest

from expertd.kernels import jit
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.grouped_gemm import VARIANTS
from expertd.kernels.backends.hopper.tiles import (
    CONFIGS,
    NORMAL,
    NORMAL_CLUSTER2,
    SWAP_AB,
    SWIGLU,
    Plan,
    TileConfig,
    choose,
)
from expertd.layout import Layout


@pytest.mark.parametrize("config", [*CONFIGS, SWIGLU], ids=lambda config: config.name)
def test_host_and_device_agree_on_the_storage(config: TileConfig) -> None:
    """The launch requests what the kernel lays out; otherwise it would write past its shared memory."""
    variant = VARIANTS[Layout.CONTIGUOUS, config].source
    wrong = str(config.storage_bytes + 8)
    defines = tuple((name, wrong if name == "STORAGE_BYTES" else value) for name, value in variant.defines)
    with pytest.raises(jit.CompileError, match="computes another size"):
        jit.compile_source(replace(variant, defines=defines))
    checks = (
        f"static_assert(kThreads == {config.threads} && kBlockN == {config.block_n}"
        f" && kBlockK == {tiles.BLOCK_K} && kOutBlockN == {config.out_block_n}"
        f" && kHeightStep == {config.step});\n"
    )
    jit.compile_source(variant, variant.text() + checks)


C, M = Layout.CONTIGUOUS, Layout.MASKED

# (layout, n, k, num_groups, expected rows, SMs) and the plan for it, so that no change goes unnoticed
TABLE = [
    (M, 4096, 7168, 32, 20, 132, Plan(SWAP_AB, 64)),
    (M, 6144, 7168, 6, 20, 132, Plan(SWAP_AB, 64)),
    (M, 4096, 7168, 32, 48, 132, Plan(SWAP_AB, 64)),
    (M, 4096, 7168, 32, 49, 132, Plan(NORMAL, 48)),
    (C, 1536, 2048, 128, 24, 132, Plan(SWAP_AB, 64)),
    (C, 1536, 2048, 128, 32, 132, Plan(NORMAL, 48)),
    (C, 7168, 2048, 48, 128, 132, Plan(NORMAL, 48)),
    (M, 4096, 2048, 32, 192, 132, Plan(NORMAL, 48)),
    (M, 6144, 7168, 32, 197, 132, Plan(NORMAL, 48)),
    (C, 4096, 7168, 32, 256, 132, Plan(NORMAL_CLUSTER2, 48)),
    (C, 1536, 2048, 128, 256, 132, Plan(NORMAL, 48)),
    (C, 4096, 7168, 16, 512, 132, Plan(NORMAL_CLUSTER2, 48)),
    (C, 4096, 7168, 8, 4096, 132, Plan(NORMAL_CLUSTER2, 48)),
    (C, 7168, 2048, 4, 8192, 132, Plan(NORMAL, 48)),
    (C, 7168, 7168, 4, 8192, 1, Plan(NORMAL, 48)),
    (M, 6144, 7168, 1, 928, 132, Plan(NORMAL, 48)),
    (M, 7168, 3072, 1, 1282, 132, Plan(NORMAL, 48)),
    (M, 4096, 7168, 1, 1161, 132, Plan(NORMAL, 43, tall_first=True)),
    (M, 4096, 2048, 2, 512, 132, Plan(NORMAL, 42)),
    (M, 4096, 2048, 2, 468, 132, Plan(NORMAL, 37)),
    (M, 7168, 2048, 2, 565, 132, Plan(NORMAL, 48)),
    (M, 4096, 2048, 3, 512, 132, Plan(NORMAL, 48)),
]


@pytest.mark.parametrize(("layout", "n", "k", "num_groups", "rows", "num_sms", "expected"), TABLE)
def test_plans_are_unchanged(
    layout: Layout, n: int, k: int, num_groups: int, rows: float, num_sms: int, expected: Plan
) -> None:
    assert choose(layout, n, k, num_groups, rows, num_sms) == expected


def test_every_variant_is_chosen_for_something() -> None:
    chosen = {row[-1].config for row in TABLE} | {tiles.choose_swiglu(rows).config for rows in (1, 1000)}
    assert chosen == {config for _, config in VARIANTS}


@pytest.mark.parametrize("rows", [1, 64, 192, 8192])
def test_a_cluster_never_needs_more_sms_than_there_are(rows: int) -> None:
    for num_sms in range(1, 133):
        assert choose(Layout.CONTIGUOUS, 4096, 7168, 8, rows, num_sms).config.cluster <= num_sms


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("steps", range(1, 40))
def test_a_cut_is_never_slower_than_the_tallest_tiles(steps: int, num_groups: int) -> None:
    """Measured by the makespan that plans minimize."""
    columns, num_sms = 32, 132
    planned = choose(Layout.MASKED, columns * 128, 7168, num_groups, steps * 64, num_sms)
    cases = tiles._cases(steps * 64, num_groups)

    def finished(tile_steps: int) -> float:
        return sum(tiles._makespan(tiles._tiles(case, tile_steps, columns), num_sms) for case in cases)

    assert finished(planned.tile_steps) <= finished(16 * NORMAL.steps)


def test_the_makespan_of_a_few_tiles() -> None:
    """Two CTAs: 3 and 3 steps, then 2 and 1."""
    time = tiles._TIME
    assert tiles._makespan([(3, 2), (2, 1), (1, 1)], 2) == pytest.approx(time[3] + time[2])
    assert tiles._makespan([(3, 0), (2, 5), (1, 0)], 2) == pytest.approx(3 * time[2])
    assert tiles._makespan([(1, 1), (3, 2)], 2) == pytest.approx(time[1] + time[3])


def test_tiles_are_cut_as_on_the_device() -> None:
    """600 rows in tiles of at most three steps, then in tiles of two and a half steps on average."""
    assert tiles._tiles([10], 48, 1) == [(3, 2), (2, 2)]
    assert tiles._tiles([10, 2], 40, 5) == [(3, 10), (2, 10), (3, 0), (2, 5)]
