"""The error that an infer request can fail with."""

from expertd.service.engine.refusals import Reason
from expertd.service.util.sentences import shortened

_ID_CHARACTERS = 200  # longer ids are shortened in errors; UUIDs and trace ids are shorter


class RequestError(Exception):
    """A refused request: a sentence that says what was expected; metrics count it by `reason`.

    retry_after  seconds until another try may succeed; 0: unknown
    request_id   the caller's id, if it was read before the error
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Reason = "invalid_request",
        retry_after: int = 0,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_after = retry_after
        self.request_id = request_id

    @property
    def text(self) -> str:
        """The sentence, with the request id if there is one."""
        if self.request_id is None:
            return self.message
        return f"{self.message} (request id: {shortened(self.request_id, _ID_CHARACTERS)})"


def memory_full() -> RequestError:
    """The arena has no block for a request."""
    text = "limits.max_buffered_bytes: expected memory for the request, got all of it in use"
    return RequestError(text, reason="memory_full", retry_after=1)
