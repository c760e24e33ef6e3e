"""What became of a request and its answer, as the connection tells the application in `state`."""

from starlette.types import Scope

from expertd.service.http.protocol import OipError

DELIVERED = "expertd.delivered"
"""A coroutine function: True once the answer just sent has left this process for a client still there."""
LOST_STATUS = "expertd.lost_status"
"""The status that a request ended in whose body will not come: the connection's refusal, or CLIENT_GONE."""
CLIENT_GONE = 499  # what proxies log for a caller that left; never sent


async def was_delivered(scope: Scope) -> bool:
    """Wait until the answer just sent has left this process; False if the client had left before."""
    delivered = scope.get("state", {}).get(DELIVERED)
    return delivered is None or bool(await delivered())


def lost_request(scope: Scope) -> OipError:
    """What a request without a client or without a whole body ended in; nobody is sent it."""
    status: int = scope.get("state", {}).get(LOST_STATUS, CLIENT_GONE)
    if status == CLIENT_GONE:
        return OipError(status, "the client closed the connection")
    return OipError(status, "body: expected HTTP/1.1, got something else")
