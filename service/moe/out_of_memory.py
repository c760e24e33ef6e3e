"""The error for a model that does not fit in the device's memory."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from expertd.service.moe.device import device_memory
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights_file import OPTIONAL, tensor_specs

_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
# PyTorch has no type of its own for these errors of its CPU allocator, nor for sizes beyond 64 bits.
_TEXTS = ("DefaultCPUAllocator", "Storage size calculation overflowed", "integer multiplication overflow")


@contextmanager
def in_one_sentence(name: str, shape: LayerShape, device: torch.device) -> Iterator[None]:
    """Turn errors of allocation, while a model is loaded to `device`, into a MemoryError with a sentence."""
    free = _free_bytes(device)
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


def weights_bytes(shape: LayerShape) -> int:
    """Bytes of a layer's weights."""
    specs = tensor_specs(shape).items()
    return sum(math.prod(spec.shape) * _BYTES[spec.dtypes[0]] for name, spec in specs if name not in OPTIONAL)


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in _TEXTS)


def _free_bytes(device: torch.device) -> int:
    memory = device_memory(device)
    if memory is not None:
        used, total = memory
        return total - used
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
