"""The list of kernel variants: each compiles for sm_90a as it should, and the choice between them is pure."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kernels import jit, tiles
from kernels.tiles import (
    CONFIGS,
    SHARED_BYTES_LIMIT,
    SHORT,
    TALL,
    TALL_PAIR,
    VARIANTS,
    Layout,
    Plan,
    TileConfig,
    choose,
    source,
)

NAMES = [source(*variant).name for variant in VARIANTS]
MAX_GROUPS = 1024
MAX_REGISTERS_OF_A_CTA = 65_536


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, jit.Binary]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(jit.CACHE_DIR_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        sources = [source(*variant) for variant in VARIANTS]
        yield {built.name: binary for built, binary in jit.build_all(sources)}


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_compiles_without_spills_or_stack(name: str, binaries: dict[str, jit.Binary]) -> None:
    usage = binaries[name].usage
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0), usage


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_compiles_without_warnings(name: str, binaries: dict[str, jit.Binary]) -> None:
    """C75xx is ptxas on wgmma it had to serialise: right results, at a fraction of the speed."""
    assert re.findall(r"(?i).*(?:warning|serializ|C75\d\d).*", binaries[name].log) == []


@pytest.mark.parametrize(("layout", "config"), VARIANTS, ids=NAMES)
def test_a_variant_fits_an_sm(layout: Layout, config: TileConfig, binaries: dict[str, jit.Binary]) -> None:
    registers = binaries[source(layout, config).name].usage.registers
    assert registers * config.threads <= MAX_REGISTERS_OF_A_CTA
    assert config.shared_bytes(MAX_GROUPS) <= SHARED_BYTES_LIMIT


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_host_and_device_agree_on_the_storage(config: TileConfig) -> None:
    """What the launch asks for is what the kernel lays out; else it would write past its shared memory."""
    variant = source(Layout.MASKED, config)
    wrong = str(config.storage_bytes + 8)
    defines = tuple((name, wrong if name == "STORAGE_BYTES" else value) for name, value in variant.defines)
    with pytest.raises(jit.CompileError, match="computes another size"):
        jit.compile_source(replace(variant, defines=defines))
    checks = f"static_assert(kThreads == {config.threads});\n"
    jit.compile_source(variant, variant.text() + checks)


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


C, M = Layout.CONTIGUOUS, Layout.MASKED

# (layout, n, k, num_groups, expected rows, SMs) and the plan for it: no later change moves one unseen
TABLE = [
    (M, 4096, 7168, 32, 20, 132, Plan(SHORT, 64)),
    (M, 6144, 7168, 6, 20, 132, Plan(SHORT, 64)),
    (M, 4096, 7168, 32, 48, 132, Plan(SHORT, 64)),
    (M, 4096, 7168, 32, 49, 132, Plan(TALL, 48)),
    (C, 1536, 2048, 128, 24, 132, Plan(SHORT, 64)),
    (C, 1536, 2048, 128, 32, 132, Plan(TALL, 48)),
    (C, 7168, 2048, 48, 128, 132, Plan(TALL, 48)),
    (M, 4096, 2048, 32, 192, 132, Plan(TALL, 48)),
    (M, 4096, 7168, 32, 192, 132, Plan(TALL_PAIR, 48)),
    (C, 1536, 2048, 128, 256, 132, Plan(TALL, 48)),
    (C, 4096, 7168, 16, 512, 132, Plan(TALL_PAIR, 48)),
    (C, 4096, 7168, 8, 4096, 132, Plan(TALL_PAIR, 48)),
    (C, 7168, 2048, 4, 8192, 132, Plan(TALL, 48)),
    (C, 7168, 7168, 4, 8192, 1, Plan(TALL, 48)),
    (M, 6144, 7168, 1, 928, 132, Plan(TALL, 48, passes=3)),
    (M, 4096, 7168, 1, 1161, 132, Plan(TALL, 43, passes=3)),
    (M, 4096, 2048, 2, 512, 132, Plan(TALL, 48)),
]


@pytest.mark.parametrize(("layout", "n", "k", "num_groups", "rows", "num_sms", "expected"), TABLE)
def test_the_plan_for_these_shapes_stays(
    layout: Layout, n: int, k: int, num_groups: int, rows: float, num_sms: int, expected: Plan
) -> None:
    assert choose(layout, n, k, num_groups, rows, num_sms) == expected


def test_every_variant_is_chosen_for_something() -> None:
    assert {row[-1].config for row in TABLE} == set(CONFIGS)


@pytest.mark.parametrize("rows", [1, 64, 192, 8192])
def test_a_cluster_never_needs_more_sms_than_there_are(rows: int) -> None:
    for num_sms in range(1, 133):
        assert choose(Layout.CONTIGUOUS, 4096, 7168, 8, rows, num_sms).config.cluster <= num_sms


@pytest.mark.parametrize("steps", range(1, 40))
def test_a_cut_is_never_slower_than_the_tallest_tiles(steps: int) -> None:
    """Cut as the device cuts, by the makespan that the plan is made with."""
    columns, num_sms = 32, 132

    def finished(tile_steps: int) -> float:
        count = max(-(-16 * steps // tile_steps), -(-steps // TALL.steps))
        height, taller = divmod(steps, count)
        return tiles._makespan({height + 1: taller * columns, height: (count - taller) * columns}, num_sms)

    planned = choose(Layout.MASKED, columns * 128, 7168, 1, steps * 64, num_sms)
    assert finished(planned.tile_steps) <= finished(16 * TALL.steps)


def test_the_makespan_of_a_few_tiles() -> None:
    """Two CTAs, tallest first: 3 and 3 steps, then 2 and 1."""
    assert tiles._makespan({3: 2, 2: 1, 1: 1}, 2) == pytest.approx(tiles._TIME[3] + tiles._TIME[2])
    assert tiles._makespan({3: 0, 2: 5, 1: 0}, 2) == pytest.approx(3 * tiles._TIME[2])
