"""When a busy server is asked again."""

import random
from collections.abc import Callable
from typing import TypeVar

from expertd_client.deadline import Deadline
from expertd_client.errors import ServerBusyError
from expertd_client.steps import Sleep, Steps

T = TypeVar("T")

# Callers that were refused together should not come back together.
_JITTER = 0.25
_JITTER_SECONDS = 0.05


def with_retries(attempt: Callable[[], Steps[T]], max_retries: int, deadline: Deadline) -> Steps[T]:
    """What `attempt` returns; a busy server is asked again after its Retry-After and a little.

    Raises what `attempt` does: ServerBusyError if the server did not say when, after `max_retries` further
    attempts, or if the deadline does not allow another one; DeadlineError once that has passed.
    """
    retries = 0
    while True:
        deadline.check()
        try:
            return (yield from attempt())
        except ServerBusyError as busy:
            delay = _delay(busy, retries, max_retries, deadline)
        retries += 1
        yield Sleep(delay, deadline)


def _delay(busy: ServerBusyError, retries: int, max_retries: int, deadline: Deadline) -> float:
    """Seconds until the next attempt; raises `busy` if there is none."""
    if deadline.remaining() <= 0:
        raise deadline.error() from busy
    if busy.retry_after is None or retries >= max_retries:
        raise busy
    delay = busy.retry_after + random.uniform(0, _JITTER_SECONDS + _JITTER * busy.retry_after)
    if delay >= deadline.remaining():
        raise busy
    return delay
