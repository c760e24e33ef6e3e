"""What all infer requests of a process share."""

from typing import Protocol

from expertd.service.engine.refusals import Reason
from expertd.service.http.infer_body import ALIGNMENT
from expertd.service.http.infer_engine import Forward, InferEngine


class Counts(Protocol):
    """Where requests are counted; implemented by `RequestCounts` and `Metrics`."""

    def request_done(self, model: str, status: int, seconds: float) -> None: ...
    def refused(self, model: str, reason: Reason) -> None: ...
    def connection_refused(self, status: int) -> None: ...


class InferEndpoint:
    """What all infer requests share; `forward` is for an engine that raises RegionsElsewhereError."""

    def __init__(self, engine: InferEngine, metrics: Counts, forward: Forward | None = None) -> None:
        self.engine = engine
        self.metrics = metrics
        self.forward = forward

    @property
    def max_body_bytes(self) -> int:
        """Of one body, which also has to fit into the arena."""
        limit, arena = self.engine.settings.limits.max_body_bytes, self.engine.arena
        return limit if arena is None else min(limit, arena.num_bytes - ALIGNMENT)
