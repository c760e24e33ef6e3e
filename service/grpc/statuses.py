"""HTTP statuses of refusals as gRPC statuses, with what tells callers when to try again."""

from typing import NamedTuple

import grpc

from expertd.service.http.protocol import OipError
from expertd.service.inference.errors import RequestError
from expertd.service.statuses import STATUSES

_CODES = {
    200: grpc.StatusCode.OK,
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.UNAVAILABLE,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_TIMEOUTS = ("queue_timeout", "body_timeout")


class Refusal(NamedTuple):
    """How a call ends without a response; `status` is that over HTTP."""

    code: grpc.StatusCode
    text: str
    trailers: tuple[tuple[str, str], ...]
    status: int


def refusal_of(error: RequestError, status: int | None = None) -> Refusal:
    """`error` as a status; `status` is that over HTTP, None: the error's own."""
    if status is None:
        status = error.status if isinstance(error, OipError) else STATUSES[error.reason]
    code = code_of(status, error.reason)
    if not error.retry_after:
        return Refusal(code, error.text, (), status)
    # The second is what gRPC's own retries follow, in milliseconds.
    pushback = ("grpc-retry-pushback-ms", str(1000 * error.retry_after))
    return Refusal(code, error.text, (("retry-after", str(error.retry_after)), pushback), status)


def code_of(status: int, reason: str | None) -> grpc.StatusCode:
    """The code of an answer with this status of HTTP, 200 included, for this reason."""
    if reason in _TIMEOUTS:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return _CODES.get(status, grpc.StatusCode.INTERNAL)
