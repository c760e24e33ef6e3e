"""When a busy server is asked again."""

import random

from expertd_client.deadline import Deadline
from expertd_client.errors import ServerBusyError

# Callers that were refused together should not come back together.
_JITTER = 0.25
_JITTER_SECONDS = 0.05


def delay_before_retry(busy: ServerBusyError, retries: int, max_retries: int, deadline: Deadline) -> float:
    """Seconds until the next attempt, after `retries` of them: what the server said, and a little.

    Raises `busy` if it said nothing, if no attempts are left, or if the deadline does not allow it;
    DeadlineError once that has passed.
    """
    if deadline.remaining() <= 0:
        raise deadline.error() from busy
    if busy.retry_after is None or retries >= max_retries:
        raise busy
    delay = busy.retry_after + random.uniform(0, _JITTER_SECONDS + _JITTER * busy.retry_after)
    if delay >= deadline.remaining():
        raise busy
    return delay
