"""Names the streams of a GPU in a recorded trace, by a kernel on each, within a range of that name."""

import re
from collections.abc import Iterable
from typing import Any

_RANGE = "expertd stream: "
# The profiler's, in a Chrome trace: the range on the GPU, and what it calls the stream itself.
_RANGES = re.compile(
    rb'"cat":\s*"gpu_user_annotation",\s*"name":\s*"' + _RANGE.encode() + rb'([^"]*)",'
    rb'\s*"pid":\s*\d+,\s*"tid":\s*(\d+)'
)
_STREAMS = re.compile(rb'"stream (\d+)\s*"')


def mark(streams: Iterable[tuple[str, Any]]) -> None:
    """Launch a small kernel on each (name, stream); waits for nothing.

    For the thread of the steps, between two of them, while a profiler records.
    """
    import torch
    from torch.profiler import record_function

    from expertd.service.device import device_of

    for name, stream in streams:
        with device_of(stream.device).on(stream), record_function(f"{_RANGE}{name}"):
            torch.ones(1, device=stream.device)


def with_stream_names(trace: bytes) -> bytes:
    """`trace` with the names of the streams that were marked, beside the profiler's numbers."""
    names: dict[bytes, list[bytes]] = {}
    for name, stream in _RANGES.findall(trace):
        found = names.setdefault(stream, [])
        if name not in found:  # the same SMs, and so the same stream, may have several names
            found.append(name)

    def named(found: re.Match[bytes]) -> bytes:
        of = names.get(found[1])
        return found[0] if of is None else b'"%s (stream %s)"' % (b", ".join(of), found[1])

    return _STREAMS.sub(named, trace)
