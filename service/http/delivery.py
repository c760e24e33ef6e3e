"""The application's view of a request's connection, passed in the ASGI `state`."""

from typing import Protocol

from starlette.types import Scope

CONNECTION = "expertd.connection"


class Delivery(Protocol):
    """A connection, in `state` under the key CONNECTION; only our own server sets it."""

    @property
    def more_pending(self) -> bool:
        """Whether pipelined requests wait behind the current one."""


def delivery(scope: Scope) -> Delivery | None:
    """The request's connection; None if the server is not ours."""
    connection: Delivery | None = scope.get("state", {}).get(CONNECTION)
    return connection
