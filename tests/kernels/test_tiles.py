"""The tiles of the GEMM: host and device agree on each."""

from dataclasses import replace

import pytest

from expertd.kernels import jit
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.grouped_gemm import VARIANTS
from expertd.kernels.backends.hopper.tiles import TileConfig
from expertd.layout import Layout
from tests.short import few_of

CONFIGS = list(dict.fromkeys(tile for _, tile in VARIANTS))


@pytest.mark.parametrize("config", few_of(CONFIGS, (tiles.SWAP_AB, tiles.NORMAL)), ids=lambda tile: tile.name)
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
