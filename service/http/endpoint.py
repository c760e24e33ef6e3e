"""What all infer requests of a process share."""

import weakref
from typing import Protocol

from expertd.service.engine.metrics.requests import Stages
from expertd.service.engine.refusals import Reason
from expertd.service.http.gate import Gate
from expertd.service.http.infer_engine import Forward, InferEngine
from expertd.service.http.threads import Threads
from expertd.service.settings.model import Settings
from expertd.service.tracing import Tracing

_ALONE = 8  # requests of one caller in a row


class Counts(Protocol):
    """Where requests are counted; implemented by `RequestCounts` and `Metrics`."""

    def request_done(
        self, model: str, reason: Reason | None, seconds: float, stages: Stages | None = None
    ) -> None: ...
    def connection_refused(self, status: int) -> None: ...


def logs_ends(settings: Settings) -> bool:
    """Whether each infer request is one line in the log when it ends, rather than when its answer begins."""
    return settings.access_log and settings.log_format == "json"


class InferEndpoint:
    """What all infer requests share.

    forward  for an engine that raises RegionsElsewhereError
    tracing  makes spans of requests; None: there are none
    """

    def __init__(
        self,
        engine: InferEngine,
        metrics: Counts,
        gate: Gate,
        forward: Forward | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.gate = gate
        self.forward = forward
        self.tracing = tracing
        self.threads = Threads()
        self.logs_requests = logs_ends(engine.settings)
        self._last_caller: weakref.ref[object] = weakref.ref(self)  # which may have an answer in memory
        self._in_a_row = 0  # requests of the last caller

    def is_alone(self, caller: object) -> bool:
        """Whether a new request's caller has sent the last ones, too: others have no requests meanwhile."""
        if caller is self._last_caller():
            self._in_a_row += 1
        else:
            self._last_caller, self._in_a_row = weakref.ref(caller), 0
        return self._in_a_row >= _ALONE
