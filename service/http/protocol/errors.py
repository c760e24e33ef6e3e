"""The one error a request can end in, and its form on the wire."""

import json

from expertd.service.sentences import shortened

# An id of this length comes back whole: more than a UUID or a trace has.
_ID_CHARACTERS = 200


class OipError(Exception):
    """A request that gets `status` and a sentence saying what was expected.

    `request_id` is the caller's id when it was read before the error; `headers` go into the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        request_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
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
