"""The time that a call may take."""

import math
import time
from numbers import Real

from expertd_client.errors import DeadlineError, InvalidRequestError

_FOREVER_SECONDS = 1e9  # some 30 years: sockets and protocols have no numbers for much more


def check_seconds(seconds: float) -> None:
    """Raise InvalidRequestError unless it is a positive number."""
    if not isinstance(seconds, Real) or not seconds > 0:  # NaN too
        raise InvalidRequestError(f"timeout: expected a positive number of seconds, got {seconds!r:.80}")


class Deadline:
    """`seconds` from now; math.inf: never.

    retry_seconds  for how long, since it first lost its server, a call may be repeated
    """

    __slots__ = ("_at", "_lost_at", "retry_seconds", "seconds")

    def __init__(self, seconds: float, retry_seconds: float = 0.0) -> None:
        check_seconds(seconds)
        self.seconds, self.retry_seconds = seconds, retry_seconds
        self._at = math.inf if seconds > _FOREVER_SECONDS else time.monotonic() + seconds
        self._lost_at: float | None = None

    def once(self) -> "Deadline":
        """The same, for a call that is not to be repeated, because others are there for that."""
        other = Deadline(self.seconds)
        other._at = self._at
        return other

    def remaining(self) -> float:
        """Seconds left, at most 0 once it has passed."""
        return self._at - time.monotonic()

    def check(self) -> float:
        """Seconds left. Raises DeadlineError if there are none."""
        left = self.remaining()
        if left <= 0:
            raise self.error()
        return left

    def may_repeat(self) -> bool:
        """Whether a call that has just lost its server may be made again, on this deadline."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        return now < min(self._at, self._lost_at + self.retry_seconds)

    def microseconds(self) -> int | None:
        """What is left as the protocol's `timeout`, at least 1; None without a limit."""
        left = self.remaining()
        return None if math.isinf(left) else max(1, int(left * 1e6))

    def error(self) -> DeadlineError:
        """The error of a call that has not been answered in time."""
        return DeadlineError(
            f"timeout: expected the whole answer within {self.seconds:g} s, got none by then"
        )
