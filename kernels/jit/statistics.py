"""Counts the JIT's compilations and cache hits in this process."""

import threading
from typing import NamedTuple


class JitStats(NamedTuple):
    """Compilations in this process, their seconds summed over threads, and binaries found in the cache."""

    compilations: int
    compile_seconds: float
    cache_hits: int


_lock = threading.Lock()
_stats = JitStats(0, 0.0, 0)


def stats() -> JitStats:
    """The counters since this process started."""
    return _stats


def record_compilation(seconds: float) -> None:
    global _stats
    with _lock:
        _stats = JitStats(_stats.compilations + 1, _stats.compile_seconds + seconds, _stats.cache_hits)


def record_hit() -> None:
    global _stats
    with _lock:
        _stats = _stats._replace(cache_hits=_stats.cache_hits + 1)
