"""The tiles of the GEMM: host and device agree on each."""

import re
from dataclasses import replace

import pytest

from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.grouped_gemm import VARIANTS
from expertd.kernels.backends.hopper.tiles import TileConfig
from expertd.kernels.jit.source import CSRC
from expertd.layout import Layout
from tests.kernels.front_end import errors_of
from tests.short import few_of

CONFIGS = list(dict.fromkeys(tile for _, tile in VARIANTS))


@pytest.mark.parametrize("config", few_of(CONFIGS, (tiles.SWAP_AB, tiles.NORMAL)), ids=lambda tile: tile.name)
def test_host_and_device_agree_on_the_storage(config: TileConfig) -> None:
    """The launch requests what the kernel lays out; otherwise it would write past its shared memory."""
    variant = VARIANTS[Layout.CONTIGUOUS, config].source
    wrong = str(config.storage_bytes + 8)
    defines = tuple((name, wrong if name == "STORAGE_BYTES" else value) for name, value in variant.defines)
    checks = (
        f"static_assert(kThreads == {config.threads} && kBlockN == {config.block_n}"
        f" && kBlockK == {tiles.BLOCK_K} && kOutBlockN == {config.out_block_n}"
        f" && kHeightStep == {config.step});\n"
    )
    (error,) = errors_of(replace(variant, defines=defines), checks)
    assert error.endswith('"kernels/backends/hopper/tiles.py computes another size"')
    assert errors_of(variant, f'{checks} static_assert(false, "the end");') == [
        'static assertion failed with "the end"'
    ]


def test_the_map_at_the_top_of_the_kernel_names_every_file() -> None:
    """Readers go by it, and it says which files a plain GEMM needs."""
    text = VARIANTS[Layout.MASKED, tiles.NORMAL].source.text()
    files = set(re.findall(r'#line 1 "kernels/csrc/(.*)"', text)) - {"grouped_gemm.cu"}
    top = (CSRC / "grouped_gemm.cu").read_text().partition("#include")[0]
    assert files == set(re.findall(r"\w+\.cuh", top))
