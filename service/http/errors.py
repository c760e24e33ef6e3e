"""The engine's errors as HTTP errors."""

from expertd.service.engine.errors import EngineError
from expertd.service.http.protocol import OipError
from expertd.service.statuses import status_of


def http_error(error: EngineError) -> OipError:
    """The engine's error as an HTTP error."""
    answer = OipError(status_of(error), str(error), reason=error.reason, retry_after=error.retry_after)
    answer.__cause__ = error
    return answer
