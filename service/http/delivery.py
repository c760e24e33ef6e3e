"""The application's view of a request's connection, passed in the ASGI `state`."""

from typing import Protocol

from starlette.types import Scope

from expertd.service.http.protocol import OipError

CONNECTION = "expertd.connection"
ABORT_STATUS = "expertd.abort_status"
CLIENT_GONE = 499  # as proxies log a client that disconnected; never sent


class Delivery(Protocol):
    """A connection, in `state` under the key CONNECTION; only our own server sets it."""

    @property
    def gone(self) -> bool:
        """Whether the client is known to have disconnected."""

    @property
    def sent(self) -> bool:
        """Whether the response has been written to a client that is still connected; does not wait."""

    async def delivered(self) -> bool:
        """Wait until the response is written; False if the client had disconnected before."""

    @property
    def more_pending(self) -> bool:
        """Whether pipelined requests wait behind the current one."""


def delivery(scope: Scope) -> Delivery | None:
    """The request's connection; None if the server is not ours."""
    connection: Delivery | None = scope.get("state", {}).get(CONNECTION)
    return connection


def aborted_request(scope: Scope) -> OipError:
    """The error to record for a request without a client or a whole body; it is not sent.

    If the connection refused the body, the status is in `state` under the key ABORT_STATUS.
    """
    status: int = scope.get("state", {}).get(ABORT_STATUS, CLIENT_GONE)
    if status == CLIENT_GONE:
        return OipError(status, "the client closed the connection")
    return OipError(status, "body: expected HTTP/1.1, got something else")
