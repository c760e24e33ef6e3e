"""The loads that placements are made from: what each expert of a layer had to do lately."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from expertd.service.settings.model import Settings


class LoadWindow:
    """Loads of a layer's experts; `note` is for one thread at a time, the rest is safe from any.

    half_life  seconds until a load counts half
    activated  a load is a step in which the expert got any token; else it is a token
    """

    def __init__(
        self,
        num_experts: int,
        half_life: float,
        activated: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._half_life, self._activated, self._clock = half_life, activated, clock
        self._noted = clock()
        self._loads = np.zeros(num_experts)  # replaced as a whole: others read it

    def note(self, tokens_by_rank: Sequence[NDArray[np.int64]]) -> None:
        """Count a step: the tokens of each expert on each rank."""
        tokens = np.sum(tokens_by_rank, axis=0)
        now = self._clock()
        kept = self._loads * 0.5 ** ((now - self._noted) / self._half_life)
        self._noted = now
        self._loads = kept + (tokens > 0 if self._activated else tokens)

    def loads(self) -> NDArray[np.float64]:
        """float64 [num_experts], as of the last step."""
        return self._loads


def load_windows(settings: Settings) -> list[LoadWindow]:
    """One for each model."""
    half_life, activated = settings.placement.interval_seconds, settings.placement.objective == "activated"
    return [LoadWindow(model.num_experts, half_life, activated) for model in settings.models]
