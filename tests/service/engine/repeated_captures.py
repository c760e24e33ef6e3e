"""Captures again and again: `python -m tests.service.engine.repeated_captures`.

It prints the bytes that each of three rounds of 20 changes has kept, of the host and of the GPU. It needs a
process of its own: CUPTI, once loaded by a profile, keeps memory for each graph that is captured later.
"""

import ctypes
import gc
from itertools import pairwise
from typing import Any

import torch

from expertd.service.engine.loading import load
from tests.service.apps import tiny_settings

MODEL = {
    "name": "tiny",
    "hidden_size": 2048,
    "intermediate_size": 768,
    "num_experts": 32,
    "top_k": 4,
    "datatype": "FP32",
}
OTHER = {**MODEL, "name": "other", "weights": {"seed": 7}, "load": False}


class Mallinfo2(ctypes.Structure):
    """What glibc says of its memory."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    )  # fmt: skip


def allocated_bytes() -> int:
    """Bytes of the process that glibc has handed out."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    return int(mallinfo2().uordblks)


def main() -> None:
    """Print `host gpu` for each round."""
    given = tiny_settings(models=(MODEL, OTHER), backend="hopper")
    loaded = load(given, lambda: False)
    models: Any = loaded.models
    other = models.read(given.models[1], lambda: False)

    def change(times: int) -> tuple[int, int]:
        for _ in range(times):
            loaded.prepare_steps(lambda: False)
            models.add(given.models[1], other)
            models.remove("other")
            models.collect()
        gc.collect()
        return allocated_bytes(), torch.cuda.memory_reserved()

    change(40)  # torch has 32 streams, each known from its first use on
    for before, after in pairwise([change(20) for _ in range(4)]):
        print(after[0] - before[0], after[1] - before[1])


if __name__ == "__main__":
    main()
