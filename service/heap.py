"""glibc's memory: one heap for all threads, and what is free in it given back."""

import ctypes
import os

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
