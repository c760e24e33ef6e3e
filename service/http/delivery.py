"""What the application learns of a request's connection, through the request's `state`."""

from typing import Protocol

from starlette.types import Scope

from expertd.service.http.protocol import OipError

CONNECTION = "expertd.connection"
LOST_STATUS = "expertd.lost_status"
CLIENT_GONE = 499  # what proxies log for a caller that left; never sent


class Delivery(Protocol):
    """The connection, in `state` by the key CONNECTION; a server other than ours has none."""

    @property
    def gone(self) -> bool:
        """Whether the client is known to have left."""

    @property
    def sent(self) -> bool:
        """Whether the answer has left this process for a client still there, known without waiting."""

    async def delivered(self) -> bool:
        """True once the answer just sent has left this process; False if the client had left before."""

    @property
    def more_due(self) -> bool:
        """Whether pipelined requests wait behind the one in turn."""


def delivery(scope: Scope) -> Delivery | None:
    """The request's connection, None with a server other than ours."""
    connection: Delivery | None = scope.get("state", {}).get(CONNECTION)
    return connection


def lost_request(scope: Scope) -> OipError:
    """What a request without a client or without a whole body ended in; nobody is sent it.

    Where the connection refused the body, its status is in `state` by the key LOST_STATUS.
    """
    status: int = scope.get("state", {}).get(LOST_STATUS, CLIENT_GONE)
    if status == CLIENT_GONE:
        return OipError(status, "the client closed the connection")
    return OipError(status, "body: expected HTTP/1.1, got something else")
