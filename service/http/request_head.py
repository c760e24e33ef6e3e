"""A request's line and headers: parsed by httptools, checked, and kept for requests with the same head."""

import logging
import re
from dataclasses import dataclass
from urllib.parse import unquote

import httptools

from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.http.infer_head import HttpHead
from expertd.service.http.responses import RefusedError
from expertd.service.settings.parts import Limits
from expertd.service.util.sentences import shown

logger = logging.getLogger(__name__)

_INFER = re.compile(r"/v2/models/([^/]+)/(?:versions/([^/]+)/)?infer$")  # as the application's routes
# A name or an IPv4 address, or an IPv6 address in brackets, and a port (RFC 9110, 7.2; RFC 3986, 3.2.2).
_HOST = re.compile(
    rb"(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*(?::[0-9]*)?|\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\](?::[0-9]*)?"
)
_MAX_KEPT = 256
_MAX_KEPT_BYTES = 2048  # of one head


@dataclass(slots=True, eq=False)
class RequestHead:
    """A valid head. Header names are in lower case; `raw_path` and `query` are parts of the target.

    content_length is None without that header; `infer` is None for all but infer requests.
    """

    method: str
    raw_path: bytes
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    content_length: int | None
    chunked: bool
    expects_continue: bool
    infer: HttpHead | None


class Heads:
    """Parses heads. A client repeats its headers, so the heads of infer requests are kept by their bytes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: dict[bytes, RequestHead] = {}
        self.find = self._kept.get

    def parse(self, data: bytes) -> RequestHead:
        """The head in `data`, which is whole and begins with the request line. Raises RefusedError."""
        limit = self._limits.max_header_bytes
        if len(data) > limit:
            text = f"request line and headers: expected at most {limit} bytes, got {len(data)}"
            raise RefusedError(431, text)
        head = HeadParser(self._limits).parse(data)
        if head.infer is not None and len(data) <= _MAX_KEPT_BYTES:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[data] = head
        return head


class HeadReader:
    """Finds the heads in one connection's input, and checks what there is of one as it arrives.

    parsed     bytes of the head that arrives which were looked at
    has_begun  whether a part of a head has arrived, or of the blank lines before one
    """

    def __init__(self, heads: Heads, limits: Limits) -> None:
        self._heads = heads
        self._limits = limits
        self._parser: HeadParser | None = None  # of an incomplete head
        self._blank = 0  # bytes of blank lines before it
        self.parsed = 0
        self.has_begun = False

    def read(self, data: bytes, position: int) -> tuple[RequestHead | None, int]:
        """The head in `data` from `position` on, and where it ends; None: it is incomplete.

        An incomplete one is expected again, with what comes after it. Raises RefusedError.
        """
        if not self.parsed and data[position] in b"\r\n":
            position = self._skip_blank_lines(data, position)
            if position == len(data):
                return None, position
        end = data.find(b"\r\n\r\n", position + max(0, self.parsed - 3)) + 4
        if end == 3:
            self._parse_incomplete(data, position)
            return None, position
        head_bytes = data[position:end]
        head = self._heads.find(head_bytes) or self._heads.parse(head_bytes)
        self._parser, self.parsed, self._blank, self.has_begun = None, 0, 0, False
        return head, end

    def _skip_blank_lines(self, data: bytes, position: int) -> int:
        """Robust servers ignore them before a request line (RFC 9112, 2.2)."""
        end = len(data) - len(data[position:].lstrip(b"\r\n"))
        self._blank += end - position
        self.has_begun = True
        self._check_size(self._blank)
        return end

    def _parse_incomplete(self, data: bytes, position: int) -> None:
        """Parse what there is of a head, so that invalid input is refused at once."""
        size = len(data) - position
        self._check_size(size)
        if self._parser is None:
            self._parser = HeadParser(self._limits)
        if self._parser.feed(data[position + self.parsed :]) is not None:
            raise _invalid("no empty line after a head")
        self.parsed = size
        self.has_begun = True

    def _check_size(self, size: int) -> None:
        limit = self._limits.max_header_bytes
        if size > limit:
            text = f"request line and headers: expected at most {limit} bytes, got at least {size}"
            raise RefusedError(431, text)


class HeadParser:
    """Parses one head, as it arrives."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: RequestHead | None = None
        self._error: Exception | None = None  # of a callback
        self._fed = bytearray()
        self._parser = httptools.HttpRequestParser(self)
        # We refuse other versions with a message of our own, and each coding but `chunked`.
        self._parser.set_dangerous_leniencies(lenient_version=True, lenient_transfer_encoding=True)

    def parse(self, data: bytes) -> RequestHead:
        """Parse a whole head. Raises RefusedError."""
        head = self.feed(data)
        if head is None:
            raise self._refusal_of(httptools.HttpParserError("a part of a head"))
        return head

    def feed(self, data: bytes) -> RequestHead | None:
        """Parse a part of a head; None while the parser expects more of it. Raises RefusedError."""
        self._fed += data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # ignored, as RFC 9110 (7.8) allows
        except httptools.HttpParserError as error:
            refusal = self._refusal_of(error)
            refusal.with_body = self._parser.get_method() != b"HEAD"
            raise refusal from None
        return self._head

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if self._head is not None:
            self._error = _invalid("two heads")
            raise self._error

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value.strip(b" \t")))  # RFC 9110, 5.5

    def on_headers_complete(self) -> None:
        try:
            self._head = self._complete()
        except Exception as error:
            # The parser's error has it as context only if no other exception is being handled.
            self._error = error
            raise

    def _complete(self) -> RequestHead:
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        self._check(version)
        method = parser.get_method().decode("ascii")
        # OPTIONS * asks about the server (RFC 9110, 9.3.7), as OPTIONS / does here.
        raw_path, query = _path_and_query(
            b"/" if (method, self._target) == ("OPTIONS", b"*") else self._target
        )
        length = next((value for name, value in headers if name == b"content-length"), None)
        expect = next((value for name, value in headers if name == b"expect"), b"")
        return RequestHead(
            method=method,
            raw_path=raw_path,
            query=query,
            version=version,
            headers=headers,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            content_length=None if length is None else int(length),
            chunked=any(name == b"transfer-encoding" for name, _ in headers),
            expects_continue=expect.lower() == b"100-continue",
            infer=infer_head(method, decoded(raw_path), headers),
        )

    # Checks.

    def _check(self, version: str) -> None:
        """Raise RefusedError for another version, and for a head that is ambiguous or has too many headers.

        The parser itself refuses a second Content-Length, and one together with Transfer-Encoding.
        """
        if version not in ("1.1", "1.0"):
            raise _other_version(version)
        if b" HTTP/1." not in self._fed.lstrip(b"\r\n").partition(b"\r\n")[0]:
            raise RefusedError(505, "protocol: expected HTTP, got RTSP or ICE")  # the parser takes them
        bound = self._limits.max_headers
        if len(self._headers) > bound:
            raise RefusedError(431, f"headers: expected at most {bound}, got {len(self._headers)}")
        _check_host([value for name, value in self._headers if name == b"host"], version)
        codings = [value for name, value in self._headers if name == b"transfer-encoding"]
        if codings:
            _check_transfer_encoding(b", ".join(codings), version)
        if self._parser.should_upgrade() and self._parser.get_method() == b"CONNECT":
            raise RefusedError(501, "method: expected one of this API, got CONNECT")

    def _refusal_of(self, error: httptools.HttpParserError) -> RefusedError:
        """The refusal for input that the parser, or one of its callbacks, rejected."""
        if isinstance(self._error, RefusedError):
            return self._error
        if isinstance(error, httptools.HttpParserCallbackError):
            logger.error("failed to handle the head of a request", exc_info=self._error)
            return RefusedError(500, "internal server error: see the server's log")
        if self._parser.get_method() == b"PRI":  # the first line of HTTP/2
            return _other_version("2.0")
        return _invalid(str(error))  # static words of the parser, never a value, which may be secret


def _other_version(version: str) -> RefusedError:
    return RefusedError(505, f"HTTP version: expected 1.1 or 1.0, got {version}")


def _invalid(what: str) -> RefusedError:
    return RefusedError(400, f"request: expected HTTP/1.1, got invalid input: {what}")


def infer_head(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> HttpHead | None:
    """None for all but infer requests."""
    found = _INFER.match(path) if method == "POST" else None
    return None if found is None else HttpHead(found[1], found[2] or MODEL_VERSION, headers)


def decoded(raw_path: bytes) -> str:
    """The path without percent-encoding, except for %2F, which is not a separator (RFC 3986, 2.2)."""
    path = raw_path.decode("ascii")
    if "%" not in path:
        return path
    return unquote(re.sub("%2f", "%252F", path, flags=re.IGNORECASE))


def _path_and_query(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a target, which may be a URL. Raises RefusedError."""
    try:
        url = httptools.parse_url(target)
        path = url.path or b"/"
        path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        got = shown(target.decode("latin-1"))
        raise RefusedError(400, f"target: expected a path or a URL, got {got}") from None
    return path, url.query or b""


def _check_host(values: list[bytes], version: str) -> None:
    """Raise RefusedError unless there is one Host, with a valid value (RFC 9112, 3.2); 1.0 needs none."""
    if len(values) != 1 and (values or version == "1.1"):
        raise RefusedError(400, f"Host: expected one header, got {len(values) or 'none'}")
    if values and _HOST.fullmatch(values[0]) is None:
        got = shown(values[0].decode("latin-1"))
        raise RefusedError(400, f"Host: expected a name or an address, with or without a port, got {got}")


def _check_transfer_encoding(codings: bytes, version: str) -> None:
    if version == "1.0":
        raise RefusedError(400, "HTTP version: expected 1.1 with Transfer-Encoding, got 1.0")
    if codings.lower() != b"chunked":
        got = shown(codings.decode("latin-1"))
        raise RefusedError(501, f"Transfer-Encoding: expected chunked, got {got}")
