"""The answers to infer requests: an output, or an error."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from expertd.service.engine.errors import EngineError
from expertd.service.engine.spec import LayerSpec
from expertd.service.http.bodies import ClientGoneError
from expertd.service.http.errors import http_error
from expertd.service.http.protocol import OipError, build_response, compress, oip_error, requested_encoding
from expertd.service.http.refused import Headers, header_lines
from expertd.service.inference.errors import RequestError
from expertd.service.inference.plan import Plan
from expertd.service.memory import RegionError
from expertd.service.moe.request import Output
from expertd.service.util.sentences import shown

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # as proxies log a client that disconnected; never sent


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


def refusal_of(error: Exception, model: str) -> OipError:
    """`error` as an answer; unexpected ones are logged."""
    if isinstance(error, RequestError):
        return oip_error(error)
    if isinstance(error, EngineError):
        return http_error(error)
    if isinstance(error, RegionError):
        return OipError(400, str(error))
    if isinstance(error, ClientGoneError):
        refusal = client_gone()
    else:
        logger.error("an infer request to model %s failed", shown(model), exc_info=error)
        refusal = OipError(500, "internal server error: see the server's log")
    refusal.__cause__ = error
    return refusal


def client_gone() -> OipError:
    """The outcome of a request that nobody waits for any more."""
    return OipError(CLIENT_GONE, "the client closed the connection")


def _fields(content_type: bytes, length: int, headers: Headers) -> bytes:
    first = [(b"content-type", content_type), (b"content-length", str(length).encode())]
    return header_lines([*first, *headers])
