"""The answer to input that is no request, and the lines that every response begins with."""

from collections.abc import Sequence
from http import HTTPStatus

from expertd.service.http.protocol import error_body

Headers = Sequence[tuple[bytes, bytes]]

# Of every response: a browser neither guesses what it is nor keeps it.
BROWSER_HEADERS = (("x-content-type-options", "nosniff"), ("cache-control", "no-store"))


class RefusedError(Exception):
    """Input to answer with `status` and this text before the connection is closed.

    retry_after  seconds until another try may succeed; 0: unknown
    """

    retry_after = 0

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.with_body = True  # False for HEAD

    def response(self, default_headers: Headers) -> bytes:
        """The whole response."""
        body = error_body(str(self))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.retry_after:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        head = first_lines(self.status, default_headers) + header_lines(headers) + b"\r\n"
        return head + body if self.with_body else head


def first_lines(status: int, default_headers: Headers) -> bytes:
    """The status line, and the headers of every response."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode() + header_lines(default_headers)


def header_lines(headers: Headers) -> bytes:
    """Headers as they are sent, without the empty line after the last one."""
    return b"".join([b"%s: %s\r\n" % header for header in headers])
