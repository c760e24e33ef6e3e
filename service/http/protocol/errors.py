"""Refusals as HTTP has them: with a status, headers, and a JSON body."""

import json

from expertd.service.engine.refusals import Reason
from expertd.service.inference.errors import RequestError
from expertd.service.statuses import STATUSES

_REASONS: dict[int, Reason] = {
    401: "unauthorized",
    403: "forbidden",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_encoding",
    499: "client_gone",
    500: "internal_error",
}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}}


class OipError(RequestError):
    """A refused or failed call: a status besides. `reason`: None stands for the default of the status.

    `headers` are added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: Reason | None = None,
        retry_after: int = 0,
        request_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        found = reason or _REASONS.get(status, "invalid_request")
        super().__init__(message, reason=found, retry_after=retry_after, request_id=request_id)
        self.status = status
        self.headers = {**_HEADERS.get(status, {}), **(headers or {})}
        if retry_after:
            self.headers["Retry-After"] = str(retry_after)

    def body(self) -> bytes:
        """The protocol's error object."""
        return error_body(self.text)


def oip_error(error: RequestError, status: int | None = None) -> OipError:
    """`error` with its status; None: that of its reason."""
    if isinstance(error, OipError):
        return error
    answer = OipError(
        STATUSES[error.reason] if status is None else status,
        error.message,
        reason=error.reason,
        retry_after=error.retry_after,
        request_id=error.request_id,
    )
    answer.__cause__ = error.__cause__
    return answer


def error_body(text: str) -> bytes:
    """`{"error": text}` in ASCII, which can also represent lone surrogates from a caller's JSON."""
    return json.dumps({"error": text}).encode("ascii")
