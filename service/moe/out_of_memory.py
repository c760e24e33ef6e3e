"""The error for a model that does not fit in the device's memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from expertd.service.moe.device import free_device_bytes
from expertd.service.moe.needs import weights_bytes
from expertd.service.moe.shape import LayerShape

# PyTorch has no type of its own for these errors of its CPU allocator, nor for sizes beyond 64 bits.
_TEXTS = ("DefaultCPUAllocator", "Storage size calculation overflowed", "integer multiplication overflow")


@contextmanager
def in_one_sentence(name: str, shape: LayerShape, device: torch.device) -> Iterator[None]:
    """Turn errors of allocation, while a model is loaded to `device`, into a MemoryError with a sentence."""
    free = free_device_bytes(device)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        needed = _gigabytes(weights_bytes(shape))
        text = (
            f"model {name}: expected memory for {needed} of weights and for its steps, got {_gigabytes(free)}"
        )
        raise MemoryError(f"{text} free") from error


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in _TEXTS)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
