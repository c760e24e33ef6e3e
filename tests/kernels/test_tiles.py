"""The list of kernel variants: each compiles for sm_90a as it should, and the choice between them is pure."""

import re
from collections.abc import Iterator

import pytest

from kernels import jit
from kernels.tiles import CONFIGS, SHARED_BYTES_LIMIT, SHORT, VARIANTS, Layout, TileConfig, choose, source

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
    """What the launch asks for holds what the kernel lays out; else it would write past its shared memory."""
    variant = source(Layout.MASKED, config)
    table = 2 * (MAX_GROUPS + 1) * 4
    checks = (
        f"static_assert(__builtin_offsetof(SharedStorage, groups) + {table} "
        f"<= {config.shared_bytes(MAX_GROUPS)});\n"
        f"static_assert(kThreads == {config.threads});\n"
    )
    jit.compile_source(variant, variant.text() + checks)


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("layout", list(Layout))
def test_every_variant_is_chosen_for_something_and_nothing_else_is(layout: Layout) -> None:
    chosen = {
        choose(layout, n, rows, num_sms)
        for n in (8, 128, 136, 576, 7168)
        for rows in (0.1, 1, 16, 17, 64, 65, 128, 192, 256, 8192)
        for num_sms in (1, 2, 20, 112, 132)
    }
    assert chosen == set(CONFIGS)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("n", [8, 4096, 7168])
def test_few_rows_take_tokens_on_the_short_side(layout: Layout, n: int) -> None:
    for rows in (0.01, 1, 20):
        assert choose(layout, n, rows, 132) == SHORT
    assert not choose(layout, n, 8192, 132).swapped


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rows", [1, 64, 192, 8192])
def test_a_cluster_never_needs_more_sms_than_there_are(layout: Layout, rows: int) -> None:
    for num_sms in range(1, 133):
        assert choose(layout, 4096, rows, num_sms).cluster <= num_sms
