"""Decides which samples count: not those disturbed by a change, or by prefill that has just come back.

Requests wait for a change, and graphs are captured after it. When a GPU reaches its power limit, steps take
up to 43% longer for 0.2 s, 0.8 s after prefill has come back.
"""

import math

_SETTLING_SECONDS = 1.0
_ABSENT_SECONDS = 2.0  # of prefill, after which it comes back
_LONG_ABSENT_SECONDS = 30.0
_PRESENT_PART = 0.1  # of the time of a sample, at least, for which prefill is there


class Settling:
    """Is asked after each sample."""

    def __init__(self) -> None:
        self._left = 0.0  # seconds until samples count
        self._absent = math.inf  # seconds without prefill
        self._has_counted = True  # a sample with prefill, since that came back

    @property
    def is_on(self) -> bool:
        """Whether nothing counts at present."""
        return self._left > 0.0

    def changed(self, seconds: float) -> None:
        """There is a change, which takes `seconds`; they are a part of the next sample's."""
        self._left = _SETTLING_SECONDS + seconds

    def counts(self, seconds: float, busy: float) -> bool:
        """Whether a sample of the last `seconds` counts, for the part `busy` of which there was prefill.

        While prefill is away for less than two seconds, the time that is left stops. If it comes for short
        times only, it may have to come twice until samples count.
        """
        left, absent, present = self._left, self._absent, busy >= _PRESENT_PART
        self._absent = 0.0 if present else absent + seconds
        returns = present and absent >= _ABSENT_SECONDS
        if returns and (self._has_counted or absent >= _LONG_ABSENT_SECONDS):
            self._left, self._has_counted = max(_SETTLING_SECONDS, left - seconds), False
            return False
        if present or self._absent >= _ABSENT_SECONDS:
            self._left = left - seconds
        if left > 0.0:
            return False
        self._has_counted = self._has_counted or present
        return True
