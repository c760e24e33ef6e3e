"""Captures work as CUDA graphs whose memory comes from a shared pool."""

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_one_at_a_time = threading.Lock()  # captures, and calls during which there must be none


class GraphPool:
    """Memory shared by graphs that never run at the same time; torch frees a pool with its last graph."""

    def __init__(self, device: torch.device) -> None:
        # The default stream cannot be captured. All graphs use one other: streams cannot share pool memory.
        self._side_stream = _side_stream(device.index or 0)
        nothing = torch.zeros((), device=device)
        self._anchor = _captured(nothing.zero_, self._side_stream, None)

    def capture(self, work: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """A graph of `work`, to be replayed on `stream`. It must have run once before."""
        # A partition's own stream is captured, so that the graph stays inside the partition.
        default = stream == torch.cuda.default_stream(stream.device)
        return _captured(work, self._side_stream if default else stream, self._anchor.pool())


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """A stream of a GPU for captures alone.

    torch has 32 streams, and gives them out again: what another thread enqueues there would be captured, too.
    """
    from cuda.core import Device

    torch.cuda.synchronize(index)  # creates torch's context if there is none yet
    device = Device(index)
    device.set_current()
    stream = _SideStream(int((made := device.create_stream()).handle), index)  # type: ignore[no-untyped-call]
    stream.made = made
    return stream


class _SideStream(torch.cuda.ExternalStream):
    """cuda.core's stream, for torch; it keeps that alive."""

    made: Any


def free_unused_memory() -> None:
    """Free what torch keeps for later: the GPU's memory, pinned memory, and pools of graphs that are gone."""
    with _one_at_a_time:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # without it, each pool of graphs leaves 47 KiB on the host


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`. During a capture, that would fail, and so would the capture."""
    with _one_at_a_time:
        torch.cuda.synchronize(device)


def is_current(stream: torch.cuda.Stream) -> bool:
    """Whether `stream` is the current one of its device; in less time than by torch's own objects."""
    return bool(torch._C._cuda_getCurrentRawStream(stream.device_index) == stream.cuda_stream)


def _captured(work: Callable[[], object], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with _one_at_a_time, _without_collections(), torch.cuda.stream(stream):
        # Other threads may use the device during the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the capture may be invalid already
                torch.zeros((), device=stream.device)  # torch warns about an empty graph
            with suppress(RuntimeError):  # it would only say that the capture is invalid
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@contextmanager
def _without_collections() -> Iterator[None]:
    """Destroying unreachable graphs and streams during a capture would invalidate it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
