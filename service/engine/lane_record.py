"""What choices of lanes really gave, as long as the load is alike.

A choice is measured by samples that have both decode and prefill. The median of the last ones counts, so that
one with a pause says nothing. All is forgotten when the usual tokens of a decode step or of a prefill request
differ by more than a factor of two from those when the present choice was measured first, twice in a row.
Other choices gather other numbers of requests in a step, so only samples of one choice are compared. The
correction factors are kept even then.

A choice that was left some time ago is forgotten, too, because what disturbed it may be over; and so is the
factor of splits, or of joined choices, if none of them was measured since. Each time, it is kept twice as
long as before.
"""

import statistics
from collections import deque
from typing import NamedTuple

from expertd.service.engine.lane_choice import UNTRIED_JOINED, Choice, Factors, Given, Load, calculated

_WINDOW = 21  # samples whose median counts; with fewer, scatter near the target has good choices left
_ALIKE = 2.0  # the factor, up to which two loads are
_UNLIKE_SAMPLES = 2  # in a row, after which the load is another one: a few requests may be large by chance
_KEPT_SAMPLES = 100  # without a measurement, at first: 50 s
_MOST_KEPT_SAMPLES = 600


class Usual(NamedTuple):
    """The load: tokens of decode in a step that has some, and of a prefill request."""

    decode_tokens: float
    prefill_tokens: float

    def is_like(self, other: "Usual") -> bool:
        """Whether neither number differs much."""
        return all(max(one, two) <= _ALIKE * min(one, two) for one, two in zip(self, other, strict=True))


class _Measured:
    """Of one choice. usual: at the first sample; at: the number of the last one; unlike: samples in a row."""

    def __init__(self, usual: Usual) -> None:
        self.usual, self.at, self.unlike = usual, 0, 0
        self.samples: deque[Given] = deque(maxlen=_WINDOW)

    @property
    def given(self) -> Given:
        """The median of the last samples; of an even number, the better one."""
        seconds, rates = zip(*self.samples, strict=True)
        return Given(statistics.median_low(seconds), statistics.median_high(rates))


class LaneRecord:
    """Of all choices that were tried."""

    def __init__(self) -> None:
        self._measured: dict[Choice, _Measured] = {}
        self._factors_at: dict[bool, int] = {}  # the sample that gave the factors of splits (True), of others
        self._kept: dict[Choice | bool, int] = {}  # samples for which they are, where other than at first
        self._looks = 0

    def noted(self, choice: Choice, usual: Usual, given: Given, load: Load) -> Load:
        """`load` with what `choice` gave in this sample, beside what others gave; with decode and prefill."""
        self._looks += 1
        if known := self._measured.get(choice):
            known.unlike = 0 if known.usual.is_like(usual) else known.unlike + 1
            if known.unlike >= _UNLIKE_SAMPLES:
                self._measured.clear()
                self._kept.clear()
            elif known.unlike:
                return load
        load = self._without_old(load)
        now = self._measured.setdefault(choice, _Measured(usual))
        now.samples.append(given)
        now.at = self._factors_at[choice.decode_sms > 0] = self._looks
        if len(now.samples) == _WINDOW:
            self._kept.pop(choice, None)
        load = load._replace(given={each: of.given for each, of in self._measured.items()})
        factors = _factors(choice, now.given, load)
        return load._replace(of_splits=factors) if choice.decode_sms else load._replace(of_joined=factors)

    def _without_old(self, load: Load) -> Load:
        """Forget what was measured too long ago."""
        self._measured = {each: of for each, of in self._measured.items() if not self._is_old(each, of.at)}
        old = [of_splits for of_splits, at in self._factors_at.items() if self._is_old(of_splits, at)]
        for of_splits in old:
            del self._factors_at[of_splits]
            load = (
                load._replace(of_splits=Factors()) if of_splits else load._replace(of_joined=UNTRIED_JOINED)
            )
        return load

    def _is_old(self, what: Choice | bool, at: int) -> bool:
        kept = self._kept.get(what, _KEPT_SAMPLES)
        if self._looks - at < kept:
            return False
        self._kept[what] = min(2 * kept, _MOST_KEPT_SAMPLES)
        return True


def _factors(choice: Choice, given: Given, load: Load) -> Factors:
    """What `choice` gave, over what arithmetic expects of it."""
    found = calculated(choice, load)
    if load.prefill is None or not found.decode_seconds:
        return Factors()
    share = given.prefill_rate * load.prefill.seconds / load.prefill.tokens
    return Factors(given.decode_seconds / found.decode_seconds, share / found.prefill_share)
