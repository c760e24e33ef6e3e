"""The answers to infer requests: an output, or an error."""

from collections.abc import Callable
from dataclasses import dataclass

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol import OipError, build_response, compress, requested_encoding
from expertd.service.http.refused import Headers, header_lines
from expertd.service.inference.plan import Plan
from expertd.service.moe.request import Output


@dataclass(slots=True)
class Answer:
    """A response: its status, header lines and parts of its body; `close` ends the connection after it."""

    status: int
    fields: bytes
    parts: list[bytes | memoryview]
    close: bool = False


def output_answer(
    plan: Plan, output: Output, spec: LayerSpec, accept_encoding: str, pause: Callable[[], object]
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
