"""What a device can do, at most, by its own account: plans weigh computing and memory by it."""

import functools
from dataclasses import dataclass

from expertd.kernels.backends.streams import cuda_core


@dataclass(frozen=True)
class Rates:
    """Upper bounds of a device.

    sm_mhz        clock of its SMs
    bytes_per_ns  of its memory: two transfers a clock over the width of the bus
    l2_bytes      size of its L2 cache
    """

    sm_mhz: float
    bytes_per_ns: float
    l2_bytes: int


H200 = Rates(1980, 4814, 60 << 20)


@functools.cache
def rates(device: int) -> Rates:
    """The device's rates, as the driver reports them; an H200's where it reports none."""
    properties = cuda_core().Device(device).properties
    bytes_per_ns = 2 * properties.memory_clock_rate * properties.global_memory_bus_width / 8 / 1e6
    return Rates(
        properties.clock_rate / 1e3 or H200.sm_mhz,
        bytes_per_ns or H200.bytes_per_ns,
        properties.l2_cache_size or H200.l2_bytes,
    )
