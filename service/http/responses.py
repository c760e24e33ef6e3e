"""What is sent: the answers to infer requests, refusals, and the lines that every response begins with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from expertd.service.engine.errors import EngineError
from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol import OipError, build_response, compress, error_body, requested_encoding
from expertd.service.inference.plan import RequestPlan
from expertd.service.moe.request import OutputMemory
from expertd.service.statuses import status_of

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


@dataclass(slots=True)
class Answer:
    """A response: its status, header lines and parts of its body; `close` ends the connection after it."""

    status: int
    fields: bytes
    parts: list[bytes | memoryview]
    close: bool = False


def output_answer(
    plan: RequestPlan,
    output: OutputMemory,
    spec: LayerSpec,
    accept_encoding: str,
    pause: Callable[[], object],
) -> Answer:
    """The answer with `output`; in binary and uncompressed, its beginning is kept in `plan`.

    `pause` is called while much JSON is written. Raises OipError (400) if JSON is requested but cannot
    represent the values.
    """
    response = build_response(plan.request, output, spec, pause)
    parts, headers = response.parts, []
    content_type = b"application/json"
    if response.header_length is not None:
        content_type = b"application/octet-stream"
        headers.append((b"inference-header-content-length", str(response.header_length).encode()))
    if encoding := requested_encoding(accept_encoding):
        parts = [compress(parts, encoding)]
        headers.append((b"content-encoding", encoding.encode()))
    fields = _fields(content_type, sum(map(len, parts)), headers)
    if response.header_length is not None and not encoding:
        plan.answer_head = fields, parts[0]
    return Answer(200, fields, parts)


def error_answer(refusal: OipError, expects: bool) -> Answer:
    """The answer to a refused request; `expects` says that its body may arrive only on demand."""
    headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
    kept = [header for header in headers if header[0] != b"connection"]
    body = refusal.body()
    # If the body never arrives, the next request must not be parsed as it.
    close = expects or len(kept) < len(headers)
    fields = _fields(b"application/json", len(body), kept)
    return Answer(refusal.status, fields, [body], close)


def _fields(content_type: bytes, length: int, headers: Headers) -> bytes:
    first = [(b"content-type", content_type), (b"content-length", str(length).encode())]
    return header_lines([*first, *headers])


def http_error(error: EngineError) -> OipError:
    """The engine's error as an HTTP error."""
    answer = OipError(status_of(error), str(error), reason=error.reason, retry_after=error.retry_after)
    answer.__cause__ = error
    return answer
