"""Validates a request's line and headers before the application sees them, and rewrites them in two cases."""

import logging
from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from expertd.service.http.protocol import error_body
from expertd.service.sentences import shown
from expertd.service.settings.model import Limits

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]
_LINE_BYTES = len(b"  HTTP/1.1\r\n\r\n")
_HEADER_BYTES = len(b": \r\n")


class RefusedError(Exception):
    """A request to answer with `status` and this text before the connection is closed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    def response(self, default_headers: Headers, with_body: bool = True) -> bytes:
        """The whole response, without its body for HEAD."""
        body = error_body(str(self))
        headers = [
            *default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.status == 503:
            headers.append((b"retry-after", b"1"))
        lines = [b"%s: %s\r\n" % header for header in headers]
        return b"".join([STATUS_LINE[self.status], *lines, b"\r\n", body if with_body else b""])


def check_head(
    parser: httptools.HttpRequestParser, target: bytes, headers: Headers, limits: Limits, at_most: int
) -> None:
    """Raise RefusedError for another HTTP version, or for a head that is too large or ambiguous.

    `at_most` is an upper bound on the head's bytes, which are counted only if it exceeds the limit. The
    parser itself refuses a second Content-Length, and one together with Transfer-Encoding.
    """
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise RefusedError(505, f"HTTP version: expected 1.1 or 1.0, got {version}")
    if len(headers) > limits.max_headers:
        raise RefusedError(431, f"headers: expected at most {limits.max_headers}, got {len(headers)}")
    if at_most > limits.max_header_bytes:
        _check_size(parser.get_method(), target, headers, limits.max_header_bytes)
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts != 1 and (hosts or version == "1.1"):
        raise RefusedError(400, f"Host: expected one header, got {hosts or 'none'}")
    if b"transfer-encoding" in names:
        _check_transfer_encoding(headers, version)
    if parser.should_upgrade() and parser.get_method() == b"CONNECT":
        raise RefusedError(501, "method: expected one of this API, got CONNECT")


def refusal_of(error: httptools.HttpParserError, parser: httptools.HttpRequestParser) -> RefusedError:
    """The refusal for input that the parser, or one of its callbacks, rejected."""
    if isinstance(error.__context__, RefusedError):
        return error.__context__
    if isinstance(error, httptools.HttpParserCallbackError):
        logger.error("failed to handle the head of a request", exc_info=error.__context__)
        return RefusedError(500, "internal server error: see the server's log")
    if parser.get_method() == b"PRI":
        return RefusedError(505, "HTTP version: expected 1.1 or 1.0, got 2.0")
    return RefusedError(400, f"request: expected HTTP/1.1, got invalid input: {error}")


def head_without_upgrade(parser: httptools.HttpRequestParser, target: bytes, headers: Headers) -> bytes:
    """The head that `parser` has just parsed, as bytes, without its Upgrade headers."""
    lines = [
        b"%s %s HTTP/%s" % (parser.get_method(), target, parser.get_http_version().encode()),
        *(b"%s: %s" % header for header in headers if header[0] != b"upgrade"),
    ]
    return b"\r\n".join([*lines, b"", b""])


def origin_form(target: bytes) -> bytes:
    """The path and query of a target that does not begin with a path: https://host/path?query, or *."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise RefusedError(
            400, f"target: expected a path or a URL, got {shown(target.decode('latin-1'))}"
        ) from None
    return (url.path or b"/") + (b"?" + url.query if url.query else b"")


def _check_size(method: bytes, target: bytes, headers: Headers, limit: int) -> None:
    size = len(method) + len(target) + _LINE_BYTES
    size += sum(len(name) + len(value) + _HEADER_BYTES for name, value in headers)
    if size > limit:
        raise RefusedError(431, f"request line and headers: expected at most {limit} bytes, got {size}")


def _check_transfer_encoding(headers: Headers, version: str) -> None:
    if version == "1.0":
        raise RefusedError(400, "HTTP version: expected 1.1 with Transfer-Encoding, got 1.0")
    codings = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    if codings.lower() != b"chunked":
        got = shown(codings.decode("latin-1"))
        raise RefusedError(501, f"Transfer-Encoding: expected chunked, got {got}")
