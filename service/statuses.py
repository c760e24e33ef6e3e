"""The HTTP statuses of refusals, by their reasons and by the engine's errors. Channels use them, too."""

from expertd.service.engine.errors import (
    ChannelsDisabledError,
    EngineError,
    PartitionsRefusedError,
    PartitionsUnavailableError,
    PlacementRefusedError,
    PlacementUnavailableError,
    ProfileRefusedError,
    ProfileUnavailableError,
    RepositoryRefusedError,
    RepositoryUnavailableError,
    RoutingUnavailableError,
    SharedMemoryDisabledError,
    StorageFullError,
    StorageUnavailableError,
    TooManyRequestsError,
    UnknownChannelError,
    UnknownRegionError,
)
from expertd.service.engine.refusals import ConnectionReason, Reason

STATUSES: dict[Reason, int] = {
    "body_timeout": 408,
    "body_too_large": 413,
    "client_gone": 499,  # as proxies log a client that disconnected; never sent
    "forbidden": 403,
    "internal_error": 500,
    "invalid_request": 400,
    "json_too_large": 413,
    "memory_full": 503,
    "not_ready": 503,
    "queue_full": 503,
    "queue_timeout": 503,
    "shutting_down": 503,
    "step_failed": 500,
    "too_many_tokens": 400,
    "unauthorized": 401,
    "unknown_model": 404,
    "unsupported_encoding": 415,
}
"""Statuses of infer requests."""

CONNECTION_REASONS: dict[int, ConnectionReason] = {
    400: "bad_input",
    408: "head_timeout",
    431: "head_too_large",
    500: "internal_error",
    501: "not_implemented",
    503: "too_many_connections",
    505: "wrong_version",
}
"""Reasons of statuses for input that is refused before it is a request."""
_STATUSES: dict[str, int] = {reason: status for status, reason in CONNECTION_REASONS.items()}
_STATUSES.update(STATUSES.items())

_OTHERS: dict[type[EngineError], int] = {
    ChannelsDisabledError: 403,
    SharedMemoryDisabledError: 403,
    UnknownChannelError: 404,
    UnknownRegionError: 404,
    PartitionsUnavailableError: 409,
    PlacementUnavailableError: 409,
    ProfileUnavailableError: 409,
    RepositoryRefusedError: 409,
    RepositoryUnavailableError: 409,
    RoutingUnavailableError: 409,
    PartitionsRefusedError: 422,
    PlacementRefusedError: 422,
    ProfileRefusedError: 422,
    TooManyRequestsError: 429,
    StorageUnavailableError: 503,
    StorageFullError: 507,
}


def infer_status(reason: Reason | ConnectionReason | None, queue_full_status: int) -> int:
    """The status of a request or other input that was refused for `reason`; None: it has an output."""
    if reason is None:
        return 200
    return queue_full_status if reason == "queue_full" else _STATUSES[reason]


def status_of(error: EngineError) -> int:
    """The status of a call that fails with `error`."""
    return _OTHERS.get(type(error), STATUSES[error.reason])
