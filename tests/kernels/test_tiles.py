"""The list of kernel variants: each compiles for sm_90a as it should, and the choice between them is pure."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kernels import jit
from kernels.tiles import (
    CONFIGS,
    SHARED_BYTES_LIMIT,
    SHORT,
    TALL,
    TALL_PAIR,
    VARIANTS,
    Layout,
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


# (n, num_groups, expected rows, SMs) and the tile for it: a change that moves one of these shows here
TABLE = [
    (4096, 32, 20, 132, SHORT),
    (6144, 6, 20, 132, SHORT),
    (1536, 128, 32, 132, SHORT),
    (4096, 32, 64, 132, SHORT),
    (7168, 48, 128, 132, TALL),
    (4096, 32, 192, 132, TALL),
    (1536, 128, 256, 132, TALL),
    (4096, 1, 1161, 132, TALL),
    (4096, 16, 512, 132, TALL),
    (4096, 8, 4096, 132, TALL_PAIR),
    (7168, 4, 8192, 132, TALL_PAIR),
    (7168, 4, 8192, 1, TALL),
]


@pytest.mark.parametrize(("n", "num_groups", "rows", "num_sms", "expected"), TABLE)
def test_the_choice_for_these_shapes_stays(
    n: int, num_groups: int, rows: float, num_sms: int, expected: TileConfig
) -> None:
    assert choose(n, num_groups, rows, num_sms) == expected


def test_every_variant_is_chosen_for_something() -> None:
    assert {row[-1] for row in TABLE} == set(CONFIGS)


@pytest.mark.parametrize("rows", [1, 64, 192, 8192])
def test_a_cluster_never_needs_more_sms_than_there_are(rows: int) -> None:
    for num_sms in range(1, 133):
        assert choose(4096, 8, rows, num_sms).cluster <= num_sms
