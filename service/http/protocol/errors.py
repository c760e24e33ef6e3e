"""The error that a request can fail with, and its JSON form."""

import json

from expertd.service.engine.refusals import Reason
from expertd.service.sentences import shortened

_REASONS: dict[int, Reason] = {
    401: "unauthorized",
    403: "forbidden",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_encoding",
    499: "client_gone",
    500: "internal_error",
}

# Longer ids are shortened in errors; UUIDs and trace ids are shorter.
_ID_CHARACTERS = 200


class OipError(Exception):
    """A refused or failed request: a status, and a sentence that says what was expected.

    Metrics count it by `reason`; None stands for the default of the status. `request_id` is the caller's id
    if it was parsed before the error. `headers` are added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: Reason | None = None,
        request_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason: Reason = reason or _REASONS.get(status, "invalid_request")
        self.request_id = request_id
        self.headers = headers or {}

    def body(self) -> bytes:
        """The protocol's error object; the text includes the request id if there is one."""
        if self.request_id is None:
            return error_body(self.message)
        return error_body(f"{self.message} (request id: {shortened(self.request_id, _ID_CHARACTERS)})")


def error_body(text: str) -> bytes:
    """`{"error": text}` in ASCII, which can also represent lone surrogates from a caller's JSON."""
    return json.dumps({"error": text}).encode("ascii")
