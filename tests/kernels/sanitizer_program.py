"""What the sanitizers run: every variant on small awkward shapes, each result checked."""

import torch

from kernels import grouped_gemm_contiguous, grouped_gemm_masked, jit, tiles
from kernels.tiles import Layout, TileConfig
from tests.kernels.helpers import expect_contiguous, expect_masked, poisoned, random_contiguous, random_masked

SHAPES = (([3, 0, 70, 1, 200], 264, 384), ([1], 8, 128), ([0, 0], 136, 256))
_source = tiles.source


def every_lane_arrives(layout: Layout, config: TileConfig) -> jit.Source:
    """racecheck does not follow one lane's arrival at a barrier for its warp: here every lane arrives."""
    source = _source(layout, config)
    defines = (*source.defines, ("EVERY_LANE_ARRIVES", "1"))
    return jit.Source(source.name, source.file, source.entry, defines)


def main() -> None:
    """Run all; the persistent grid is small, so that every CTA walks several tiles."""
    tiles.source = every_lane_arrives
    for config in tiles.CONFIGS:
        tiles.choose = lambda *_, chosen=config: tiles.Plan(chosen, 16 * chosen.steps)  # type: ignore[assignment]
        for rows, n, k in SHAPES:
            case = random_contiguous(rows, n, k, "cuda")
            buffer, out = poisoned(sum(rows), n, device="cuda")
            grouped_gemm_contiguous(*case.a, *case.b, case.offsets, out=out, backend="hopper", num_sms=4)
            expect_contiguous(case, buffer, out)
            max_m = max(*rows, 1)
            masked = random_masked(rows, max_m, n, k, "cuda")
            buffer, out = poisoned(len(rows), max_m, n, device="cuda")
            grouped_gemm_masked(*masked.a, *masked.b, masked.counts, out=out, backend="hopper", num_sms=4)
            expect_masked(masked, buffer, out)
    torch.cuda.synchronize()
    print("every variant ran")


if __name__ == "__main__":
    main()
