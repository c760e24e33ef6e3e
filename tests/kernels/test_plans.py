"""The plans of the GEMM: for given shapes they are fixed, and tiles are cut as on the device."""

import itertools

import pytest

from expertd.kernels.backends.hopper import plans, tiles
from expertd.kernels.backends.hopper.grouped_gemm import VARIANTS
from expertd.kernels.backends.hopper.plans import GemmPlan, choose, choose_swiglu
from expertd.kernels.backends.hopper.rates import H200, Rates
from expertd.kernels.backends.hopper.tiles import (
    LARGE,
    MIDDLE,
    MXFP4_FEW,
    MXFP4_GLU,
    MXFP4_GLU_FEW,
    MXFP4_SWIGLU,
    MXFP4_SWIGLU_FEW,
    NARROW,
    NARROWEST,
    NORMAL,
    NORMAL_CLUSTER2,
    SHORT,
    SWAP_AB,
    SWAP_AB_TWICE,
    SWIGLU,
    SWIGLU_FEW,
    SWIGLU_FEW_TWICE,
    WIDE,
)
from expertd.layout import Layout
from expertd.weight_format import WeightFormat

C, M = Layout.CONTIGUOUS, Layout.MASKED
FP8, MXFP4 = WeightFormat.FP8, WeightFormat.MXFP4

RATES = {132: H200, 114: Rates(1755, 2039, 50 << 20), 78: Rates(1980, 4023, 60 << 20), 48: H200, 1: H200}

# (layout, n, k, num_groups, expected rows, SMs) and the plan for it, so that no change goes unnoticed. An
# H100 or H200 has 132 SMs, the PCIe card 114, an H20 78; 48 are a partition of an H200.
TABLE = [
    (M, 4096, 7168, 32, 20, 132, GemmPlan(SWAP_AB, 64)),
    (M, 4096, 7168, 32, 49, 132, GemmPlan(NORMAL, 48)),
    (C, 1536, 2048, 128, 24, 132, GemmPlan(SWAP_AB, 64)),
    (C, 1536, 2048, 128, 32, 132, GemmPlan(SHORT, 16)),
    (C, 7168, 2048, 48, 128, 132, GemmPlan(NORMAL, 48)),
    (M, 6144, 7168, 32, 197, 132, GemmPlan(LARGE, 32)),
    (C, 4096, 7168, 16, 512, 132, GemmPlan(NORMAL_CLUSTER2, 48)),
    (C, 4096, 7168, 8, 4096, 132, GemmPlan(NORMAL_CLUSTER2, 48)),
    (C, 7168, 7168, 4, 8192, 1, GemmPlan(NORMAL, 48)),
    (M, 6144, 7168, 1, 928, 132, GemmPlan(NORMAL, 48)),
    (M, 4096, 7168, 1, 1161, 132, GemmPlan(NORMAL, 38, tall_first=True)),
    (M, 4096, 2048, 2, 512, 132, GemmPlan(NORMAL, 40, tall_first=True)),
    (M, 4096, 2048, 3, 512, 132, GemmPlan(WIDE, 32, tall_first=True)),
    (C, 3072, 4096, 4, 300, 132, GemmPlan(NORMAL, 48, tall_first=True)),
    (C, 6144, 7168, 4, 235, 132, GemmPlan(WIDE, 32)),
    (C, 4096, 7168, 1, 16, 132, GemmPlan(NARROWEST, 16)),
    (C, 6144, 7168, 1, 16, 132, GemmPlan(NARROW, 16)),
    (C, 4096, 7168, 1, 200, 132, GemmPlan(SHORT, 16)),
    (C, 4096, 7168, 1, 300, 132, GemmPlan(MIDDLE, 32)),
    (C, 5120, 1536, 1, 70, 132, GemmPlan(SWAP_AB, 27)),
    (C, 5120, 1536, 1, 1000, 132, GemmPlan(NORMAL, 48)),
    (C, 4096, 7168, 1, 1133, 132, GemmPlan(NORMAL, 42, tall_first=True)),
    (C, 6144, 7168, 1, 512, 114, GemmPlan(LARGE, 32)),
    (C, 6144, 7168, 1, 512, 78, GemmPlan(NORMAL, 48)),
    (C, 4096, 7168, 1, 1000, 114, GemmPlan(NORMAL, 37, tall_first=True)),
    (C, 4096, 7168, 2, 200, 114, GemmPlan(WIDE, 32)),
    (C, 4096, 7168, 8, 4096, 78, GemmPlan(NORMAL_CLUSTER2, 48)),
    (C, 7168, 2048, 32, 16, 48, GemmPlan(SWAP_AB_TWICE, 32)),
    (C, 7168, 2048, 32, 16, 78, GemmPlan(SWAP_AB, 64)),
]


@pytest.mark.parametrize(("layout", "n", "k", "num_groups", "rows", "num_sms", "expected"), TABLE)
def test_plans_are_unchanged(
    layout: Layout, n: int, k: int, num_groups: int, rows: float, num_sms: int, expected: GemmPlan
) -> None:
    assert choose(layout, n, k, num_groups, rows, num_sms, rates=RATES[num_sms]) == expected


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("rows", [16, 200, 512, 1000])
def test_plans_depend_on_the_ratio_of_a_devices_rates(rows: int, factor: float) -> None:
    scaled = Rates(H200.sm_mhz * factor, H200.bytes_per_ns * factor, H200.l2_bytes)
    for num_groups in (1, 2, 8):
        sizes = (Layout.CONTIGUOUS, 6144, 7168, num_groups, rows, 132)
        assert choose(*sizes, rates=scaled) == choose(*sizes)


def test_every_variant_is_chosen_for_something() -> None:
    chosen = {row[-1].config for row in TABLE}
    for case in itertools.product((1, 1000), (48, 132), (False, True)):
        chosen |= {choose_swiglu(*case, H200, *weights).config for weights in ((FP8, 128), *tiles.FOUR_BITS)}
    for m, (weights, size) in itertools.product((1, 1000), tiles.FOUR_BITS):
        chosen.add(choose(M, 4096, 7168, 8, m, 132, weights=weights, group_size=size).config)
    assert chosen == {config for _, config in VARIANTS}


def test_few_sms_have_two_ctas_each_while_groups_have_few_rows() -> None:
    chosen = [choose_swiglu(rows, num_sms).config for rows in (40, 41) for num_sms in (2, 69, 70, 132)]
    assert chosen == [SWIGLU_FEW_TWICE] * 2 + [SWIGLU_FEW] * 2 + [SWIGLU] * 4
    slow = Rates(H200.sm_mhz, H200.bytes_per_ns / 2, H200.l2_bytes)
    assert choose_swiglu(40, 48, rates=slow).config is SWIGLU_FEW, "half of the memory feeds half of the SMs"


@pytest.mark.parametrize("layout", [C, M])
def test_mxfp4_has_tall_tiles_where_they_are_faster(layout: Layout) -> None:
    """As measured with even groups: plain ones from between 32 and 64 rows on, activated ones from 32."""
    sizes = [(layout, 4096, 7168, 32, rows, 132) for rows in (1, 32, 40, 41, 64, 512)]
    plain = [choose(*size, weights=MXFP4, group_size=32) for size in sizes]
    assert [plan.config for plan in plain] == [MXFP4_FEW] * 3 + [tiles.MXFP4] * 3
    assert [plan.tile_steps for plan in plain] == [64] * 3 + [128] * 3
    for other, few, many in ((False, MXFP4_SWIGLU_FEW, MXFP4_SWIGLU), (True, MXFP4_GLU_FEW, MXFP4_GLU)):
        activated = [choose_swiglu(rows, 132, other, H200, MXFP4, 32) for rows in (1, 16, 24, 25, 32, 512)]
        assert [plan.config for plan in activated] == [few] * 3 + [many] * 3


@pytest.mark.parametrize("rows", [1, 64, 192, 8192])
def test_a_cluster_never_needs_more_sms_than_there_are(rows: int) -> None:
    for num_sms, (weights, size) in itertools.product(range(1, 133), ((FP8, 128), *tiles.FOUR_BITS)):
        plan = choose(Layout.CONTIGUOUS, 4096, 7168, 8, rows, num_sms, weights=weights, group_size=size)
        assert plan.config.cluster <= num_sms


@pytest.mark.parametrize("num_groups", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 30, 70, 200, 300, 512, 1000])
def test_tiles_of_a_part_end_where_it_ends(rows: int, num_groups: int) -> None:
    """Parts begin at multiples of 256."""
    for n in (4096, 6144, 7168):
        assert 256 % choose(Layout.CONTIGUOUS, n, 7168, num_groups, rows, 132, part=True).config.block_n == 0


@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (3072, 7168), (2048, 7168), (7168, 2048)])
@pytest.mark.parametrize(("num_groups", "most"), [(1, 1.01), (2, 1.1)])
@pytest.mark.parametrize("rows", [200, 432, 560, 1000, 1200])
def test_hardly_any_cut_would_finish_earlier(n: int, k: int, num_groups: int, most: float, rows: int) -> None:
    """By the estimate that plans minimize; only some cuts are tried."""
    sizes = (n, k, num_groups, rows, 132)
    planned = choose(Layout.MASKED, *sizes)
    cuts = [
        GemmPlan(config, tile_steps, num_groups == 1)
        for config in (NORMAL, WIDE, MIDDLE)
        for tile_steps in range(16, 16 * config.steps + 1)
    ]
    assert plans._time(planned, *sizes) <= most * min(plans._time(cut, *sizes) for cut in cuts)


@pytest.mark.parametrize(
    ("num_groups", "n", "tall_first"), [(4, 2048, True), (5, 512, False), (4, 32768, False)]
)
def test_tall_tiles_of_few_groups_come_first_while_their_weights_fit_the_l2_cache(
    num_groups: int, n: int, tall_first: bool
) -> None:
    assert choose(Layout.CONTIGUOUS, n, 512, num_groups, 1000, 132).tall_first == tall_first


def test_tiles_start_column_by_column_in_bands_of_eight() -> None:
    """As the device's scheduler orders them: two columns of two tiles of three steps and eight of two."""
    assert plans._by_columns([(3, 2), (2, 8)], 2) == [(3, 2), (2, 6), (3, 2), (2, 6), (2, 4)]


def test_a_groups_tall_tiles_come_first_only_if_the_last_tile_ends_earlier() -> None:
    """Measured: 1.03 of the time for 1000 rows of [5120, 1536], 0.93 for 1133 rows of [4096, 7168]."""
    for sizes, earlier in (((5120, 1536, 1, 1000, 132), False), ((4096, 7168, 1, 1136, 132), True)):
        plan = choose(Layout.CONTIGUOUS, *sizes)
        other = GemmPlan(plan.config, plan.tile_steps, not plan.tall_first)
        assert plan.tall_first == earlier
        assert plans._time(plan, *sizes) <= plans._time(other, *sizes)
