"""The heap: one of glibc for all threads, its free memory given back, and imports without the collector."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_ARENA_MAX = -8  # of mallopt (malloc.h)


def share_heap() -> None:
    """Have all threads of this process allocate from one heap, unless MALLOC_ARENA_MAX is set.

    Else each thread has a heap of its own, and what is freed there is of no use to the others, so that memory
    grows slowly under load. They seldom wait: nearly all hold Python's lock when they allocate.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 1)


def give_back_freed() -> None:
    """Return freed memory to the system: glibc keeps blocks of up to 32 MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports in this block take a fifth less time, and what exists at its end is never searched again.

    The collector would search all that torch makes many times, for nothing. Later collections are short too,
    while the process serves and when it ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
