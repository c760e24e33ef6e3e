"""Where backends launch: torch's current stream, as cuda.core has it."""

import functools
from typing import Any, NamedTuple

import torch


class OnStream(NamedTuple):
    """Where to launch: the device, the stream's handle, and cuda.core's object for it."""

    device: int
    handle: int
    stream: Any


def current_stream(device: int) -> OnStream:
    """Torch's current stream."""
    # torch.cuda.current_stream makes an object each time
    return _on_stream(device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def cuda_core() -> Any:
    """cuda.core, imported late: only launches need it, and the list of variants is read without it."""
    import cuda.core
    import cuda.core.utils

    return cuda.core


@functools.lru_cache(maxsize=4096)
def _on_stream(device: int, handle: int) -> OnStream:
    """Cached, since from_handle defines a class; by device, since default streams share a handle."""
    return OnStream(device, handle, cuda_core().Stream.from_handle(handle))
