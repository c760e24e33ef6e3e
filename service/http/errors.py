"""The engine's errors as HTTP errors."""

from expertd.service.engine.errors import EngineError
from expertd.service.engine.statuses import ANSWERS
from expertd.service.http.protocol import OipError


def http_error(error: EngineError) -> OipError:
    """The engine's error as an HTTP error."""
    status, reason = ANSWERS[type(error)]
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    answer = OipError(status, str(error), reason=reason, headers=headers)
    answer.__cause__ = error
    return answer
