"""The reasons why an infer request gets no output: a closed set, so that each has its own counter."""

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
