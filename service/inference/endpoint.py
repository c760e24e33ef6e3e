"""What all infer requests of a process share, and the engine that computes them."""

import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from expertd.service.engine.metrics.requests import StageSeconds
from expertd.service.engine.refusals import Reason
from expertd.service.engine.spec import LayerSpec
from expertd.service.engine.steps import Submission
from expertd.service.inference.gate import Gate
from expertd.service.inference.head import InferHead
from expertd.service.inference.threads import Threads
from expertd.service.memory import Arena, RegionUses
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.model import Settings
from expertd.service.tracing import Tracing

_ALONE = 8  # requests of one caller in a row


class InferEngine(Protocol):
    """Implemented by `expertd.service.engine.engine.Engine` and `...channels.remote.RemoteEngine`.

    arena  of large bodies and outputs; None: they are bytes
    """

    @property
    def settings(self) -> Settings: ...
    @property
    def models(self) -> Mapping[str, LayerSpec]: ...
    @property
    def arena(self) -> Arena | None: ...
    @property
    def draining(self) -> bool: ...

    def model(self, name: str, version: str = ...) -> LayerSpec:
        """The served model `name`, loaded or not. Raises UnknownModelError."""

    def check_loaded(self, model: str) -> None:
        """Raise NotReadyError during loading."""

    def check_capacity(self, model: str, num_tokens: int = 1, caller: int = 0) -> None:
        """Raise an EngineError if a request of `caller` with `num_tokens` or more would be refused now."""

    def validate(self, model: str, request: LayerRequest) -> None:
        """Raise ValueError for invalid routing; without an error, it may still be refused by `done`."""

    def submit(self, submission: Submission) -> Any:
        """Compute its request, and call `done` once on the event loop. Raises EngineError.

        Gives what `cancel` takes, with the request's times.
        """

    def cancel(self, pending: Any, error: Exception) -> bool:
        """Answer a queued request with `error`, now or soon; not if all of it is being computed."""

    def region_uses(self) -> RegionUses | None:
        """The regions of a new request; None if shared memory is off. Raises RegionsElsewhereError."""


class Forward(Protocol):
    """Has the engine's process answer a whole infer request."""

    def __call__(self, head: InferHead, key_name: str, content: bytes) -> Awaitable[Any]: ...


class Counts(Protocol):
    """Where requests are counted; implemented by `RequestCounts` and `Metrics`."""

    def request_done(
        self, model: str, reason: Reason | None, seconds: float, stages: StageSeconds | None = None
    ) -> None: ...


def logs_ends(settings: Settings) -> bool:
    """Whether each infer request is one line in the log when it ends, rather than when its answer begins."""
    return settings.access_log and settings.log_format == "json"


class InferEndpoint:
    """What all infer requests share.

    status_of  what logs, spans and answers call a reason of a refusal, and an output (None)
    forward    for an engine that raises RegionsElsewhereError
    tracing    makes spans of requests; None: there are none
    """

    def __init__(
        self,
        engine: InferEngine,
        metrics: Counts,
        gate: Gate,
        status_of: Callable[[Reason | None], int],
        forward: Forward | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.gate = gate
        self.status_of = status_of
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
