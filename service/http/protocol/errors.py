"""The one error a request can end in, and its form on the wire."""

import json

from expertd.service.engine.refusals import Reason
from expertd.service.sentences import shortened

_REASONS: dict[int, Reason] = {
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_encoding",
    499: "client_gone",
    500: "internal_error",
}

# An id of this length comes back whole: more than a UUID or a trace has.
_ID_CHARACTERS = 200


class OipError(Exception):
    """A request that gets `status` and a sentence saying what was expected.

    Metrics count it by `reason`, None for the one that the status stands for. `request_id` is the caller's
    id when it was read before the error; `headers` go into the answer.
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
        """The protocol's error object, with the request's id in the text when there is one."""
        if self.request_id is None:
            return error_body(self.message)
        return error_body(f"{self.message} (request id: {shortened(self.request_id, _ID_CHARACTERS)})")


def error_body(text: str) -> bytes:
    """`{"error": text}` in ASCII, so that a lone surrogate out of a caller's JSON can be answered too."""
    return json.dumps({"error": text}).encode("ascii")
