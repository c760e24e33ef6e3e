"""Tells the front end about the rank's device and kernels, for its metrics."""

import threading
import time
from collections.abc import Callable

from expertd.kernels.jit import stats
from expertd.service.engine.loading import LoadedLayers
from expertd.service.engine.metrics.ranks import RankDevice

_SECONDS = 2.0  # between two looks


def tell_changes(loaded: LoadedLayers, tell: Callable[..., None]) -> None:
    """Tell the fields of `RankDevice` now, and whenever they have changed."""
    known: RankDevice | None = None

    def look() -> None:
        nonlocal known
        kernels = stats()
        of_kernels = kernels.compilations, kernels.compile_seconds, kernels.cache_hits
        now = RankDevice(loaded.memory(), *of_kernels, next(iter(loaded.gpus()), ""))
        if now != known:
            known = now
            tell(*now)

    def watch() -> None:
        while True:
            time.sleep(_SECONDS)
            look()

    look()
    threading.Thread(target=watch, name="expertd-device", daemon=True).start()
