"""Counters on the device by which the CTAs of a launch share out its tiles."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

COUNTERS = 1 << 17  # a device; each is two int32, so 1 MB


class ClaimCounters:
    """A pair of zeros for every launch that may run at the same time as another.

    Launches on one stream follow each other, and each leaves its pair at zero, so a stream needs one. A
    captured launch has one to itself, for its graph may be replayed on any stream.
    """

    def __init__(self) -> None:
        self._slabs: dict[int, Tensor] = {}
        self._free: dict[int, Iterator[int]] = {}
        self._of_stream: dict[tuple[int, int], int] = {}

    def prepare(self, device: int) -> None:
        """Make the device's counters; not during a capture, where zeroing them would be captured too."""
        if device not in self._slabs:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "expected warm_up() or a call before a CUDA graph is captured, got neither"
                )
            slab = torch.zeros(COUNTERS, 2, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.synchronize(device)  # launches on other streams must find zeros
            self._slabs[device] = slab
            self._free[device] = itertools.islice(itertools.count(slab.data_ptr(), 8), COUNTERS)

    def get(self, device: int, stream: int) -> int:
        """The address of a launch's pair."""
        if torch.cuda.is_current_stream_capturing():
            return self._take(device)
        pair = self._of_stream.get((device, stream))
        if pair is None:
            pair = self._of_stream[device, stream] = self._take(device)
        return pair

    def _take(self, device: int) -> int:
        try:
            return next(self._free[device])
        except StopIteration:
            raise RuntimeError(
                f"expected at most {COUNTERS} streams and captured launches, got more"
            ) from None
