"""The error for a model that does not fit in the device's memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from expertd.service.device import Device
from expertd.service.moe.needs import Needs

# PyTorch has no type of its own for these errors of its CPU allocator, nor for sizes beyond 64 bits.
_TEXTS = ("DefaultCPUAllocator", "Storage size calculation overflowed", "integer multiplication overflow")


@contextmanager
def in_one_sentence(name: str, needs: Needs, device: Device) -> Iterator[None]:
    """Turn errors of allocation, while a model is loaded to `device`, into a MemoryError with a sentence."""
    free = device.free_bytes()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise does_not_fit(f"model {name}", needs, free) from error


def does_not_fit(what: str, needs: Needs, free: int) -> MemoryError:
    """The error, with the numbers."""
    return MemoryError(f"{what}: expected {needs} of free memory, got {free / 1e6:.1f} MB")


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in _TEXTS)
