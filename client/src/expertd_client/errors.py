"""The exceptions of this package. Every text is one sentence: `name: expected this, got that`."""

_KEY = "key "  # what a 403 is about, if it is not the server's settings


class ExpertError(Exception):
    """Base class; `status` is the HTTP status that the server answered, or None if no answer is the cause."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class InvalidRequestError(ExpertError, ValueError):
    """The request is wrong: found before it was sent (status None), or by the server (400, 413, ...)."""


class AccessDeniedError(ExpertError):
    """The server has API keys: the request has none, or an unknown one (401), or it lacks the right (403)."""


class UnknownModelError(ExpertError):
    """The server has no model of this name (404)."""


class ServerBusyError(ExpertError):
    """The server cannot answer now (503, 429): full, loading, or shutting down.

    `retry_after` is the number of seconds after which it wants to be asked again, or None if it did not say.
    """

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, status)
        self.retry_after = retry_after


class DeadlineError(ExpertError, TimeoutError):
    """The call's `timeout` passed before its answer was complete."""


class ServerUnreachableError(ExpertError, ConnectionError):
    """No connection, or it broke before the answer was complete.

    `may_repeat`: False if this side has ended it.
    """

    def __init__(self, message: str, status: int | None = None, may_repeat: bool = True) -> None:
        super().__init__(message, status)
        self.may_repeat = may_repeat


class InvalidAnswerError(ExpertError):
    """The answer is not what the protocol says; the connection was closed."""


class TransportUnavailableError(ExpertError):
    """The transport cannot be used with this server or for this call; nothing was sent."""


def error_of(status: int, text: str, retry_after: float | None = None) -> ExpertError:
    """The exception for a status that is not a success, of HTTP or of a channel."""
    if status in (429, 503):
        return ServerBusyError(text, status, retry_after)
    if status == 404:
        return UnknownModelError(text, status)
    if status == 401 or (status == 403 and text.startswith(_KEY)):
        return AccessDeniedError(text, status)
    if 400 <= status < 500 and status != 408:
        return InvalidRequestError(text, status)
    if status < 400:
        return InvalidAnswerError(f"status: expected 200 or an error, got {status}", status)
    return ExpertError(text, status)
