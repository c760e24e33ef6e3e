"""Takes requests that have ended from the event loop, and has a thread of its own make their spans."""

import logging
import random
import threading
from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING

from expertd.service.settings.parts import TracingSettings
from expertd.service.tracing.context import TraceContext
from expertd.service.tracing.request import TracedRequest

if TYPE_CHECKING:
    from expertd.service.tracing.spans import Spans

logger = logging.getLogger(__name__)

_MAX_KEPT = 2048  # requests, before their spans are made
_LOOK_SECONDS = 0.1  # between looks for requests
# Making the spans of a request takes a fraction of a millisecond, in which the event loop and the thread of
# the steps may wait, so the thread makes few in a row, unless very many wait.
_PAUSE_SECONDS = 1e-3
_PARTS = 128  # of those that wait, one at once, if that is more
_STOP_SECONDS = 3.0  # for the last ones to be exported


def is_installed() -> bool:
    """Whether the packages of expertd[otel] are there."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class Tracing:
    """The spans of one process's requests; all methods but `start` and `stop` are quick.

    dropped  requests whose spans were not made, because too many waited
    """

    def __init__(self, settings: TracingSettings) -> None:
        assert settings.endpoint is not None
        self._endpoint = settings.endpoint
        self._ratio = settings.sample_ratio
        self._requests: deque[TracedRequest] = deque()
        self.dropped = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def samples(self, context: TraceContext | None) -> bool:
        """Whether spans of a request are made: the caller's decision, or else a random one."""
        return random.random() < self._ratio if context is None else context.is_sampled

    def add(self, request: TracedRequest) -> None:
        """Have spans made soon, unless too many requests wait for that."""
        if len(self._requests) < _MAX_KEPT:
            self._requests.append(request)
        else:
            self.dropped += 1

    def start(self) -> None:
        """Import OpenTelemetry, and start the thread."""
        from expertd.service.tracing.spans import Spans

        spans = Spans(self._endpoint)
        self._thread = threading.Thread(target=self._work, args=(spans,), name="expertd-tracing", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Export what is left, and stop the thread; waits a few seconds at most."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("spans were not exported to %s within %g s", self._endpoint, _STOP_SECONDS)

    def _work(self, spans: "Spans") -> None:
        reported = 0
        while not self._end.wait(_PAUSE_SECONDS if self._requests else _LOOK_SECONDS):
            self._make(spans, max(1, len(self._requests) // _PARTS))
            if (dropped := self.dropped) != reported and not self._requests:
                logger.warning("requests without spans, because too many waited: %d", dropped - reported)
                reported = dropped
        self._make(spans, len(self._requests))
        spans.close()

    def _make(self, spans: "Spans", max_spans: int) -> None:
        for _ in range(min(max_spans, len(self._requests))):
            try:
                spans.add(self._requests.popleft())
            except Exception:  # the next one may be fine
                logger.exception("making spans of a request failed")


def tracing_of(settings: TracingSettings) -> Tracing | None:
    """None without an endpoint: then nothing of OpenTelemetry is imported."""
    return None if settings.endpoint is None else Tracing(settings)
