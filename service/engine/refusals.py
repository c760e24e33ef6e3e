"""Why infer requests get no output, and input is no request: closed sets, each with a counter of its own."""

from typing import Literal, get_args

Reason = Literal[
    "body_timeout",
    "body_too_large",
    "client_gone",
    "forbidden",
    "internal_error",
    "invalid_request",
    "json_too_large",
    "memory_full",
    "not_ready",
    "queue_full",
    "queue_timeout",
    "shutting_down",
    "step_failed",
    "too_many_tokens",
    "unauthorized",
    "unknown_model",
    "unsupported_encoding",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

ConnectionReason = Literal[
    "bad_input",
    "head_timeout",
    "head_too_large",
    "internal_error",
    "not_implemented",
    "too_many_connections",
    "wrong_version",
]
CONNECTION_REASONS: tuple[ConnectionReason, ...] = get_args(ConnectionReason)
"""Why input was refused before it was a request."""
