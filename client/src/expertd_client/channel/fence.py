"""Order between accesses to memory that processes share; the server uses it too."""

import platform
import threading

_WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64")
_barrier = threading.Lock()


def fence() -> None:
    """Order the accesses to memory before this call with those after it; x86 does so by itself.

    Elsewhere the release of the first lock and the acquisition of the second one are the barrier.
    """
    if _WEAKLY_ORDERED:
        with _barrier:
            pass
        with _barrier:
            pass
