"""What steps have used so far; imports no torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# More are copied without the interpreter's lock; getting it back may take longer than a small copy.
_LOCKED_BYTES = 64 * 1024


@dataclass(slots=True)
class Launches:
    """How the steps of a layer were launched.

    graph      replayed a CUDA graph for their number of tokens
    recurring  replayed a CUDA graph of a step with the same memory
    eager      launch by launch
    host       on a CPU
    """

    graph: int = 0
    recurring: int = 0
    eager: int = 0
    host: int = 0


@dataclass(slots=True)
class HostCopies:
    """What the host has copied between requests and the memory of steps. For one thread at a time."""

    num_bytes: int = 0
    seconds: float = 0.0

    def copy(self, target: memoryview, source: memoryview) -> None:
        """Copy the bytes of `source` to `target`, which is of bytes, in one dimension."""
        began = time.perf_counter()
        if source.nbytes <= _LOCKED_BYTES:
            target[:] = source.cast("B")
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        self._note(began, source.nbytes)

    def timed(self, copy: Callable[[], T], num_bytes: int) -> T:
        """The result of `copy`, which copies `num_bytes`."""
        began = time.perf_counter()
        result = copy()
        self._note(began, num_bytes)
        return result

    def _note(self, began: float, num_bytes: int) -> None:
        self.seconds += time.perf_counter() - began
        self.num_bytes += num_bytes


@dataclass(slots=True)
class StoreCounts:
    """What the steps of a layer did whose experts are in the host's memory. For one thread at a time.

    hits        experts with tokens in a step that were on the device
    misses      those that were copied to it
    num_bytes   of these copies
    wait_seconds  in which the device waited for them
    """

    hits: int = 0
    misses: int = 0
    num_bytes: int = 0
    wait_seconds: float = 0.0

    def add(self, other: "StoreCounts", times: int = 1) -> None:
        """Count what another one has; times -1: no longer."""
        self.hits += times * other.hits
        self.misses += times * other.misses
        self.num_bytes += times * other.num_bytes
        self.wait_seconds += times * other.wait_seconds

    def less(self, other: "StoreCounts") -> "StoreCounts":
        """Without what another one has."""
        made = replace(self)
        made.add(other, -1)
        return made


@dataclass(frozen=True)
class StepUse:
    """What all layers of a process have used.

    launches  by model; weights: their bytes, by model
    copies    of the host
    memory    bytes of the GPU in use, by owner: weights, staging (rows of steps), workspace (graphs and
              temporary tensors), outside (CUDA itself, and other processes); None on a CPU
    stores    of the layers whose experts are in the host's memory, by model
    """

    launches: dict[str, Launches]
    weights: dict[str, int]
    copies: HostCopies
    memory: dict[str, int] | None
    stores: dict[str, StoreCounts] = field(default_factory=dict)


NOTHING = StepUse({}, {}, HostCopies(), None)
