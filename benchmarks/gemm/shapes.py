"""The shapes of the grouped GEMM benchmark: sizes of models that people run, expert loads drawn by seed."""

from dataclasses import dataclass

import numpy as np

from expertd.layout import Layout
from expertd.weight_format import FP8_BLOCKS, WeightLayout

SEED = 20


@dataclass(frozen=True)
class Shape:
    """One grouped GEMM: rows[g] rows of group g against [n, k] weights; max_m only in the masked layout."""

    band: str
    layout: Layout
    rows: tuple[int, ...]
    n: int
    k: int
    max_m: int = 0

    @property
    def num_groups(self) -> int:
        return len(self.rows)

    @property
    def flops(self) -> int:
        return 2 * sum(self.rows) * self.n * self.k

    @property
    def bytes(self) -> int:
        """The least traffic: weights of groups with rows, activations and scales once, bf16 output once."""
        return self.bytes_with(FP8_BLOCKS)

    def bytes_with(self, weights: WeightLayout) -> int:
        """The same with weights in another format."""
        active = sum(1 for rows in self.rows if rows)
        rows = sum(self.rows) * (self.k + self.k // 128 * 4 + self.n * 2)
        return active * weights.num_bytes(self.n, self.k) + rows

    @property
    def label(self) -> str:
        mean = round(sum(self.rows) / self.num_groups)
        return f"{self.layout.value[:6]} g{self.num_groups} m{mean} {self.n}x{self.k}"


def _uniform(num_groups: int, mean: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(x) for x in rng.integers(int(mean * 0.7), int(mean * 1.3) + 1, num_groups))


def _dirichlet(num_groups: int, mean: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(x) for x in rng.multinomial(num_groups * mean, rng.dirichlet([0.6] * num_groups)))


_FIVE = ((6144, 7168), (7168, 3072), (4096, 7168), (7168, 2048), (4096, 2048))
_SIX = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048), (4096, 7168), (7168, 2048))
# (groups, mean rows, N, K): gate/up and down of DeepSeek-V3, Kimi-K2, Qwen3-30B-A3B, Qwen3-235B-A22B, GLM-4.5
_UNEVEN = (
    (8, 700, 4096, 7168), (16, 512, 4096, 7168), (32, 256, 4096, 7168), (32, 64, 4096, 7168),
    (8, 700, 7168, 2048), (16, 512, 7168, 2048), (32, 256, 7168, 2048), (32, 64, 7168, 2048),
    (48, 128, 4096, 7168), (48, 128, 7168, 2048), (48, 32, 4096, 7168),
    (128, 32, 1536, 2048), (128, 64, 1536, 2048), (64, 128, 1536, 2048), (128, 256, 1536, 2048),
    (128, 32, 2048, 768), (128, 64, 2048, 768), (64, 128, 2048, 768), (128, 256, 2048, 768),
    (32, 128, 3072, 4096), (16, 512, 3072, 4096), (32, 128, 4096, 1536), (16, 512, 4096, 1536),
    (20, 300, 3072, 5120), (20, 300, 5120, 1536), (40, 128, 3072, 5120), (40, 128, 5120, 1536),
)  # fmt: skip


# (groups, N, K): gate/up and down of DeepSeek-V3 on 8 GPUs, and down of gpt-oss-120b with K rounded up
_EACH = (32, 4096, 7168), (32, 7168, 2048), (128, 2880, 2944)


def even_shapes() -> list[Shape]:
    """Groups of 1 to 512 rows each, a band for every number of rows: for weights in other formats."""
    return [
        Shape(f"each {rows}", Layout.CONTIGUOUS, (rows,) * groups, n, k)
        for rows in (1, 4, 8, 16, 32, 64, 128, 256, 512)
        for groups, n, k in _EACH
    ]


def all_shapes(seed: int = SEED) -> list[Shape]:
    """Every shape of the benchmark; the loads depend on the seed alone."""
    rng = np.random.default_rng(seed)
    shapes = [
        Shape("contiguous large", Layout.CONTIGUOUS, _uniform(groups, mean, rng), n, k)
        for groups, mean in ((4, 8192), (8, 4096))
        for n, k in _SIX
    ]
    shapes += [
        Shape("contiguous uneven", Layout.CONTIGUOUS, _dirichlet(groups, mean, rng), n, k)
        for groups, mean, n, k in _UNEVEN
    ]
    masked = (("masked 192", 32, 192), ("masked 20", 32, 20)), (
        ("masked few groups", 6, 1024), ("masked few groups", 6, 20), ("masked few groups", 1, 1024),
        ("masked few groups", 2, 512), ("masked few groups", 4, 256),
    )  # fmt: skip
    for band, groups, mean in (*masked[0], *masked[1]):
        max_m = -(-int(mean * 1.3) // 128) * 128
        shapes += [Shape(band, Layout.MASKED, _uniform(groups, mean, rng), n, k, max_m) for n, k in _FIVE]
    return shapes
