"""Tile counters on the device, from which the CTAs of a launch take its tiles."""

import itertools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

COUNTERS = 1 << 17  # per device; each is two int32, so 1 MB


class TileCounters:
    """A pair of zeros for every launch that may run concurrently with another.

    Launches on one stream run in order, and each leaves its pair at zero, so a stream needs one pair. A CUDA
    graph may be replayed on any stream, so each stream captured into it needs another. Pairs are never freed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: dict[int, Tensor] = {}
        self._free: dict[int, Iterator[int]] = {}
        self._of_stream: dict[tuple[int, int, int], int] = {}

    def prepare(self, device: int) -> None:
        """Allocate the device's counters; not during a capture, which would capture the zeroing too."""
        if device in self._slabs:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tile counters: expected warm_up() or a call before a CUDA graph is captured, got neither"
            )
        with self._lock:
            if device in self._slabs:  # from another thread's first call
                return
            slab = torch.zeros(COUNTERS, 2, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.synchronize(device)  # launches on other streams must see zeros
            self._free[device] = itertools.islice(itertools.count(slab.data_ptr(), 8), COUNTERS)
            self._slabs[device] = slab  # last: it is looked for without the lock

    def get(self, device: int, stream: int) -> int:
        """The address of a launch's pair."""
        key = device, stream, _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
        pair = self._of_stream.get(key)
        if pair is None:
            pair = self._of_stream[key] = self._take(device)
        return pair

    def _take(self, device: int) -> int:
        try:
            return next(self._free[device])
        except StopIteration:
            raise RuntimeError(
                f"tile counters: expected at most {COUNTERS} streams and captured graphs, got more"
            ) from None


def _capture_id(stream: int) -> int:
    """The id of the stream's capture: never 0, and unique in the process."""
    from cuda.bindings import driver

    status, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"stream: expected one that is capturing, got {status.name}")
    return int(number)
