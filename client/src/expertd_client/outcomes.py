"""How a call to a server ends, in the words of a pool's metrics."""

from typing import Literal, get_args

from expertd_client.errors import (
    DeadlineError,
    ExpertError,
    ServerBusyError,
    ServerUnreachableError,
    UnknownModelError,
)
from expertd_client.retries import is_late

Outcome = Literal["answered", "unreachable", "draining", "full", "unknown_model", "timeout", "error"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def outcome_of(error: ExpertError) -> Outcome:
    """How a call has ended that raised this error."""
    if isinstance(error, ServerUnreachableError):
        return "unreachable"
    if isinstance(error, UnknownModelError):
        return "unknown_model"
    if isinstance(error, DeadlineError):
        return "timeout"
    if not isinstance(error, ServerBusyError):
        return "error"
    if is_late(error):
        return "timeout"
    return "draining" if error.status == 503 and error.retry_after is None else "full"
