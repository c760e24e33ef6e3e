"""The one error a request can end in, and its form on the wire."""

import json


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
        text = self.message if self.request_id is None else f"{self.message} (request id: {self.request_id})"
        return error_body(text)


def error_body(text: str) -> bytes:
    """`{"error": text}` in ASCII, so that a lone surrogate out of a caller's JSON can be answered too."""
    return json.dumps({"error": text}).encode("ascii")
