"""Everything that is ever compiled: the closed list, for warm-up, `expertd kernels` and the tests."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from expertd.kernels.backends.hopper import layer_kernels, tiles
from expertd.kernels.jit import Source


class Variant(NamedTuple):
    """A source, and of a CTA its threads and, for so many groups, its dynamic shared memory in bytes."""

    source: Source
    threads: int
    shared_bytes: Callable[[int], int]


VARIANTS = (
    *(
        Variant(tiles.source(layout, config), config.threads, config.shared_bytes)
        for layout, config in tiles.VARIANTS
    ),
    *(
        Variant(source, layer_kernels.THREADS[source.entry], partial(layer_kernels.shared_bytes, source))
        for source in layer_kernels.SOURCES
    ),
)
