"""The engine's errors as HTTP errors."""

from expertd.service.engine.errors import EngineError
from expertd.service.engine.statuses import ANSWERS
from expertd.service.http.protocol import OipError


def http_error(error: EngineError) -> OipError:
    """The engine's error as an HTTP error."""
    status, reason = ANSWERS[type(error)]
    answer = OipError(status, str(error), reason=reason, retry_after=error.retry_after)
    answer.__cause__ = error
    return answer
