"""What the Triton backend compiles for a GPU, and the tiles that it plans; needs neither."""

import itertools

import pytest

from expertd.kernels.backends.triton.plans import choose, max_tiles
from expertd.kernels.backends.triton.targets import TARGETS, Target, target_of
from expertd.kernels.backends.triton.variants import FOUR_BIT_HEIGHTS, HEIGHTS, LOW_HEIGHTS, variants_for
from expertd.layout import Layout


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), 80), ((8, 6), 86), ((8, 7), 86), ((8, 9), 89), ((9, 0), 90), ((12, 0), 120), ((12, 1), 121),
        ((7, 5), None), ((10, 0), None), ((11, 0), None),
    ],
)  # fmt: skip
def test_a_gpu_gets_what_it_can_run(capability: tuple[int, int], target: int | None) -> None:
    assert target_of(capability) == (None if target is None else TARGETS[target])


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_a_target_s_variants_have_unique_names(target: Target) -> None:
    names = [variant.name for variant in variants_for(target)]
    assert len(set(names)) == len(names)


# (heights, expected rows, groups, columns, SMs) and the height, so that no change goes unnoticed. An RTX 4070
# has 46 SMs, an H200 132.
TABLE = [
    (HEIGHTS, 0.25, 128, 2048, 132, 16),
    (HEIGHTS, 8, 128, 2048, 132, 16),
    (HEIGHTS, 16, 128, 2048, 132, 32),
    (HEIGHTS, 32, 128, 2048, 46, 64),
    (HEIGHTS, 64, 128, 2048, 46, 128),
    (HEIGHTS, 1000, 128, 2048, 132, 128),
    (HEIGHTS, 100, 2, 2048, 132, 64),  # 32 tiles of 128 rows for 132 SMs
    (LOW_HEIGHTS, 1000, 128, 768, 132, 64),
    (FOUR_BIT_HEIGHTS, 10, 384, 4096, 46, 16),
    (FOUR_BIT_HEIGHTS, 11, 384, 4096, 46, 64),
    (FOUR_BIT_HEIGHTS, 1000, 384, 4096, 46, 64),
    (FOUR_BIT_HEIGHTS, 100, 1, 2048, 46, 16),  # 32 tiles of 64 rows for 46 SMs
]


@pytest.mark.parametrize(("heights", "expected_m", "groups", "n", "sms", "height"), TABLE)
def test_heights(
    heights: tuple[int, ...], expected_m: float, groups: int, n: int, sms: int, height: int
) -> None:
    assert choose(heights, expected_m, groups, n, sms) == height


def test_no_division_of_rows_has_more_tiles_than_a_grid_allows_for() -> None:
    for rows, groups, height in itertools.product(range(1, 9), range(1, 5), (1, 2, 3)):
        most = max(
            sum(-(-part // height) for part in parts)
            for parts in itertools.product(range(rows + 1), repeat=groups)
            if sum(parts) == rows
        )
        assert max_tiles(Layout.CONTIGUOUS, rows, groups, 300, height) == 3 * most
        assert max_tiles(Layout.MASKED, rows, groups, 300, height) == 3 * groups * -(-rows // height)
