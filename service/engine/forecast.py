"""How long a model's steps will take, and how many tokens will arrive meanwhile, from the last second."""

import math
import time
from collections.abc import Callable

_RECENT_SECONDS = 1.0  # older steps say nothing: else what they say would never be measured again
_HALF_SECONDS = 0.25  # until a step counts half
_DOUBTFUL_SECONDS = 0.1  # on an idle device: the next step may well take less than recent ones
_STEADY_MARGIN = 1.5  # up to which `margin` shows that no single step took far longer than others
_MIN_MARGIN, _MAX_MARGIN = 1.1, 2.0
_SPREADS = 2.5  # by which few steps exceed what is forecast for them
_BEYOND = 2.0  # of the largest recent step: what is larger may be the first of its kind


class ArrivalRate:
    """The rate at which tokens arrive, from the last second."""

    __slots__ = ("_clock", "_tokens", "_when")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tokens = 0.0  # weighted by age
        self._when = -math.inf  # of the latest ones

    def note(self, num_tokens: int, when: float) -> None:
        """Count tokens that wait for a step now."""
        self._tokens = num_tokens + self._tokens * _kept(when - self._when)
        self._when = when

    @property
    def per_second(self) -> float:
        """How many will likely arrive."""
        return self._tokens * _kept(self._clock() - self._when) * math.log(2) / _HALF_SECONDS


class Forecast:
    """A line through the recent steps: seconds by tokens, by least squares."""

    __slots__ = ("_clock", "_excess", "_largest", "_sums", "_when")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._when = -math.inf  # of the latest step
        # Of 1, tokens, seconds, tokens² and tokens x seconds, weighted by age.
        self._sums = 0.0, 0.0, 0.0, 0.0, 0.0
        self._excess = 0.0  # the same of the squared part by which steps took longer than the line says
        self._largest = 0.0  # tokens; it fades, too

    def note(self, num_tokens: int, seconds: float) -> None:
        """Keep what a step took."""
        now = self._clock()
        kept = _kept(now - self._when)
        weight, tokens, sum_seconds, squares, products = self._sums
        self._sums = (
            kept * weight + 1.0,
            kept * tokens + num_tokens,
            kept * sum_seconds + seconds,
            kept * squares + num_tokens**2,
            kept * products + num_tokens * seconds,
        )
        self._largest = max(kept * self._largest, num_tokens)
        self._when = now
        expected = self.step(num_tokens)
        excess = max(0.0, seconds / expected - 1.0) if expected else 0.0
        self._excess = kept * self._excess + excess**2

    def step(self, num_tokens: float) -> float:
        """Seconds that a step takes, or more; 0: unknown."""
        if self._clock() - self._when > _RECENT_SECONDS:
            return 0.0
        weight, tokens, seconds, squares, products = self._sums
        tokens, seconds = tokens / weight, seconds / weight
        variance = squares / weight - tokens**2
        slope = max(0.0, products / weight - tokens * seconds) / variance if variance > 1.0 else math.inf
        # Nothing takes less than no time, so steps of one size are taken to be in proportion.
        slope = min(slope, seconds / tokens)
        return seconds + slope * (min(num_tokens, _BEYOND * self._largest) - tokens)

    def is_doubtful(self, num_tokens: float) -> bool:
        """Whether an idle device should try a step, whatever is forecast for it.

        If single steps took far longer than others, it should after as long as the step likely takes: few
        slow ones must not have all requests refused, and vain steps then take half of its time at most.
        """
        idle = self._clock() - self._when
        if idle > _DOUBTFUL_SECONDS:
            return True
        return not self.is_steady and idle > self.step(num_tokens)

    @property
    def is_steady(self) -> bool:
        """Whether no single step took far longer than others."""
        return self.margin <= _STEADY_MARGIN

    @property
    def margin(self) -> float:
        """How many times as long as `step` nearly all steps take, by how far recent ones exceeded it."""
        weight = self._sums[0]
        spread = math.sqrt(self._excess / weight) if weight else 0.0
        return min(max(_MIN_MARGIN, 1.0 + _SPREADS * spread), _MAX_MARGIN)

    def until_end(
        self, num_tokens: int, step_tokens: int, wait: float = 0.0, behind: int = 0, arriving: float = 0.0
    ) -> float:
        """Seconds, after `wait`, of steps of at most `step_tokens` tokens each, until `num_tokens` are done.

        behind    tokens that wait, and are in the last step, too, if it has room
        arriving  the same, a second, until it begins
        """
        full, rest = divmod(num_tokens - 1, step_tokens)
        wait += full * self.step(step_tokens) if full else 0.0
        return wait + self.step(min(step_tokens, rest + 1 + behind + arriving * wait))


def _kept(age: float) -> float:
    return 0.5 ** (age / _HALF_SECONDS) if age <= _RECENT_SECONDS else 0.0
