"""One table that maps the engine's errors to HTTP statuses and to the reasons that metrics count."""

from expertd.service.engine.errors import (
    EngineError,
    NotReadyError,
    PartitionsRefusedError,
    PartitionsUnavailableError,
    QueueFullError,
    QueueTimeoutError,
    RegionRefusedError,
    SchedulerClosedError,
    SharedMemoryDisabledError,
    StepFailedError,
    UnknownModelError,
    UnknownRegionError,
)
from expertd.service.engine.refusals import Reason
from expertd.service.http.protocol import OipError

ANSWERS: dict[type[EngineError], tuple[int, Reason]] = {
    RegionRefusedError: (400, "invalid_request"),
    SharedMemoryDisabledError: (403, "invalid_request"),
    UnknownModelError: (404, "unknown_model"),
    UnknownRegionError: (404, "invalid_request"),
    PartitionsUnavailableError: (409, "invalid_request"),
    PartitionsRefusedError: (422, "invalid_request"),
    StepFailedError: (500, "step_failed"),
    NotReadyError: (503, "not_ready"),
    QueueFullError: (503, "queue_full"),
    QueueTimeoutError: (503, "queue_timeout"),
    SchedulerClosedError: (503, "shutting_down"),
}


def http_error(error: EngineError) -> OipError:
    """The engine's error as an HTTP error."""
    status, reason = ANSWERS[type(error)]
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
    answer = OipError(status, str(error), reason=reason, headers=headers)
    answer.__cause__ = error
    return answer
