"""When a call is made again: of a busy server, or of one that was lost, as while it is restarted.

Every call may be made twice: an answer depends on nothing but its request.
"""

import random
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, ServerBusyError, ServerUnreachableError
from expertd_client.steps import Sleep, Steps

T = TypeVar("T")

# Callers that were refused together should not come back together.
_JITTER = 0.25
_JITTER_SECONDS = 0.05
_FIRST_SECONDS, _LAST_SECONDS = 0.01, 0.25  # between attempts of a lost server, doubled from one to the next
_DOUBLINGS = 5


def with_retries(
    attempt: Callable[[], Steps[T]], max_retries: int, deadline: Deadline, error: ExpertError | None = None
) -> Steps[T]:
    """What `attempt` returns; `error`: of one before.

    A busy server that says when is asked again then, and a little later, `max_retries` times. Lost calls are
    repeated for as long as `deadline.may_repeat` says. Raises what the last attempt did, also if the deadline
    does not allow another one; DeadlineError once that has passed.
    """
    for retries in count():
        if error is None:
            try:
                return (yield from attempt())
            except (ServerBusyError, ServerUnreachableError) as failed:
                error = failed
        yield Sleep(_delay(error, retries, max_retries, deadline), deadline)
        deadline.check()
        error = None
    raise AssertionError("unreachable")


def is_lost(error: ExpertError | None) -> bool:
    """Whether a call has no answer because its server ends, starts, is unreachable, or too busy for now."""
    if isinstance(error, ServerUnreachableError):
        return error.may_repeat
    # Another attempt would not be in time either.
    return isinstance(error, ServerBusyError) and error.status == 503 and not is_late(error)


def is_late(error: ServerBusyError) -> bool:
    """Whether a server cannot answer within the request's timeout."""
    return str(error).startswith(("timeout", "the request's timeout"))


def _delay(error: ExpertError, retries: int, max_retries: int, deadline: Deadline) -> float:
    """Seconds until the next attempt; raises `error` if there is none."""
    retry_after = error.retry_after if isinstance(error, ServerBusyError) else None
    if isinstance(error, ServerBusyError) and deadline.remaining() <= 0:
        raise deadline.error() from error
    if (retry_after is None or retries >= max_retries) and not (is_lost(error) and deadline.may_repeat()):
        raise error
    if retry_after is None:
        max_delay = min(_LAST_SECONDS, _FIRST_SECONDS * 2 ** min(retries, _DOUBLINGS))
        delay = random.uniform(max_delay / 2, max_delay)
    else:
        delay = retry_after + random.uniform(0, _JITTER_SECONDS + _JITTER * retry_after)
    if delay >= deadline.remaining():
        raise error
    return delay
