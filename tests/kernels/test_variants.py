"""Every variant compiles for sm_90a, without spills, stack or warnings."""

import re
from collections.abc import Iterator

import pytest

from expertd.kernels import jit
from expertd.kernels.backends.hopper.variants import VARIANTS
from expertd.kernels.jit import Variant
from expertd.limits import MAX_GROUPS

_SHARED_BYTES_LIMIT = 232_448  # of a CTA on Hopper
pytestmark = pytest.mark.thorough  # compiling takes most of a minute

MAX_REGISTERS_OF_A_CTA = 65_536
NAMES = [variant.source.name for variant in VARIANTS]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, jit.Binary]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(jit.CACHE_DIR_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        sources = [variant.source for variant in VARIANTS]
        yield {built.name: binary for built, binary in jit.build_all(sources)}


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_compiles_without_spills_or_stack(name: str, binaries: dict[str, jit.Binary]) -> None:
    usage = binaries[name].usage
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0), usage


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_compiles_without_warnings(name: str, binaries: dict[str, jit.Binary]) -> None:
    """C75xx is ptxas's warning that it serialized wgmma: correct results, at a fraction of the speed."""
    assert re.findall(r"(?i).*(?:warning|serializ|C75\d\d).*", binaries[name].log) == []


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_it_fits_an_sm(variant: Variant, binaries: dict[str, jit.Binary]) -> None:
    assert binaries[variant.source.name].usage.registers * variant.threads <= MAX_REGISTERS_OF_A_CTA
    assert variant.shared_bytes(MAX_GROUPS) <= _SHARED_BYTES_LIMIT


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)
