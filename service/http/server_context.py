"""What the connections of a server share: the application, limits, a buffer, and parsed heads."""

import logging
import time
from typing import Any, Protocol

from starlette.types import ASGIApp

from expertd.service.engine.refusals import ConnectionReason
from expertd.service.http.connection_limits import ConnectionLimits, CrowdedError
from expertd.service.http.request_head import Heads
from expertd.service.http.responses import Headers, first_lines
from expertd.service.inference.endpoint import InferEndpoint, logs_ends
from expertd.service.settings.model import Settings
from expertd.service.statuses import CONNECTION_REASONS

logger = logging.getLogger(__name__)

_SCRATCH_BYTES = 128 * 1024
_WARN_EVERY_SECONDS = 60.0


class UvicornState(Protocol):
    """The part of `uvicorn.server.ServerState` that a protocol has to use."""

    connections: set[Any]
    tasks: set[Any]
    default_headers: list[tuple[bytes, bytes]]


class ConnectionCounts(Protocol):
    """Where refused connections are counted; implemented by `RequestCounts` and `Metrics`."""

    def connection_refused(self, reason: ConnectionReason) -> None: ...


class ServerContext:
    """State shared by all connections of a server, on one event loop.

    scratch         where sockets are read to; the bytes are consumed before any other read
    min_read_bytes  that a client must read of a response in keep_alive_seconds, unless it has read all
    cut_off         connections whose client did not read its response in time, up to now
    """

    def __init__(
        self, app: ASGIApp, endpoint: InferEndpoint, metrics: ConnectionCounts, settings: Settings
    ) -> None:
        self._metrics = metrics
        self.app = app
        self.endpoint = endpoint
        self.engine = endpoint.engine
        self.limits = settings.limits
        self.keep_alive_seconds = seconds = settings.keep_alive_seconds
        self.min_read_bytes = max(1, seconds * settings.limits.min_response_bytes_per_second)
        self.access_log = settings.access_log
        self.logs_ends = logs_ends(settings)
        self.heads = Heads(settings.limits)
        self.connection_limits = ConnectionLimits(settings.limits)
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.cut_off = 0
        self._default_headers: Headers = []
        self._first_lines: dict[int, bytes] = {}
        self._warned: dict[str, float] = {}  # when, by limit

    def first_lines(self, status: int, default_headers: Headers) -> bytes:
        """The beginning of a response; kept until the headers of all responses change, once a second."""
        if default_headers is not self._default_headers:
            self._default_headers = default_headers
            self._first_lines.clear()
        lines = self._first_lines.get(status)
        if lines is None:
            lines = self._first_lines[status] = first_lines(status, default_headers)
        return lines

    def count_refusal(self, status: int) -> None:
        """Count input that was refused with `status`."""
        self._metrics.connection_refused(CONNECTION_REASONS[status])

    def warn(self, refusal: CrowdedError) -> None:
        """Log that clients are being refused, at most once a minute for each limit."""
        now = time.monotonic()
        if now - self._warned.get(refusal.limit, float("-inf")) >= _WARN_EVERY_SECONDS:
            self._warned[refusal.limit] = now
            logger.warning(refusal.warning)
