"""The status of each of the engine's errors, in one table."""

from expertd.service.engine.errors import (
    EngineError,
    NotReadyError,
    PartitionsRefusedError,
    PartitionsUnavailableError,
    QueueFullError,
    QueueTimeoutError,
    SchedulerClosedError,
    StepFailedError,
    UnknownModelError,
)
from expertd.service.http.protocol import OipError

STATUS: dict[type[EngineError], int] = {
    UnknownModelError: 404,
    PartitionsUnavailableError: 409,
    PartitionsRefusedError: 422,
    StepFailedError: 500,
    NotReadyError: 503,
    QueueFullError: 503,
    QueueTimeoutError: 503,
    SchedulerClosedError: 503,
}


def http_error(error: EngineError, request_id: str | None = None) -> OipError:
    """The engine's error as an answer, with the request's id in its text where there is one."""
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFullError) else {}
    answer = OipError(STATUS[type(error)], str(error), request_id=request_id, headers=headers)
    answer.__cause__ = error
    return answer
