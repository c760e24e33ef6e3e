"""What choices of lanes really gave, as long as the load is alike.

A choice is measured at looks at which there were both decode and prefill. The middle of the last ones counts,
so that one with a pause says nothing. All is forgotten when the usual tokens of a decode step or of a prefill
request differ by more than a factor of two from those when the present choice was measured first, twice in a
row. Other choices gather other numbers of requests in a step, so only looks at one choice are compared. By
what arithmetic was wrong, is kept beyond that. A choice that was left long ago is forgotten, too, the sooner
the fewer looks it had: what disturbed it may be over.
"""

import statistics
from collections import deque
from typing import NamedTuple

from expertd.service.engine.lane_choice import Choice, Factors, Given, Load, calculated

_MEASURED_LOOKS = 21  # whose middle counts; with fewer, scatter near the target has good choices left
_ALIKE = 2.0  # the factor, up to which two loads are
_UNLIKE_LOOKS = 2  # in a row, after which the load is another one: a few requests may be large by chance
_KEPT_LOOKS = 100  # without a measurement, for each that there was: 50 s; 5 minutes at most
_MOST_KEPT_LOOKS = 600


class Usual(NamedTuple):
    """The load: tokens of decode in a step that has some, and of a prefill request."""

    decode_tokens: float
    prefill_tokens: float

    def is_like(self, other: "Usual") -> bool:
        """Whether neither number differs much."""
        return all(max(one, two) <= _ALIKE * min(one, two) for one, two in zip(self, other, strict=True))


class _Measured:
    """Of one choice. usual: at the first look; at: the number of the last one; unlike: looks in a row."""

    def __init__(self, usual: Usual) -> None:
        self.usual, self.at, self.unlike = usual, 0, 0
        self.looks: deque[Given] = deque(maxlen=_MEASURED_LOOKS)

    def is_known(self, looks: int) -> bool:
        """Whether it still counts, after so many looks in all."""
        return looks - self.at < min(_KEPT_LOOKS * len(self.looks), _MOST_KEPT_LOOKS)

    @property
    def given(self) -> Given:
        """The middle of the last looks; of two, the better one."""
        seconds, rates = zip(*self.looks, strict=True)
        return Given(statistics.median_low(seconds), statistics.median_high(rates))


class LaneRecord:
    """Of all choices that were tried."""

    def __init__(self) -> None:
        self._measured: dict[Choice, _Measured] = {}
        self._looks = 0

    def noted(self, choice: Choice, usual: Usual, given: Given, load: Load) -> Load:
        """`load` with what `choice` gave at this look, beside what others gave; with decode and prefill."""
        self._looks += 1
        if known := self._measured.get(choice):
            known.unlike = 0 if known.usual.is_like(usual) else known.unlike + 1
            if known.unlike >= _UNLIKE_LOOKS:
                self._measured.clear()
            elif known.unlike:
                return load
        self._measured = {each: of for each, of in self._measured.items() if of.is_known(self._looks)}
        now = self._measured.setdefault(choice, _Measured(usual))
        now.looks.append(given)
        now.at = self._looks
        load = load._replace(given={each: of.given for each, of in self._measured.items()})
        factors = _factors(choice, now.given, load)
        return load._replace(of_splits=factors) if choice.decode_sms else load._replace(of_joined=factors)


def _factors(choice: Choice, given: Given, load: Load) -> Factors:
    """What `choice` gave, over what arithmetic expects of it."""
    found = calculated(choice, load)
    if load.prefill is None or not found.decode_seconds:
        return Factors()
    share = given.prefill_rate * load.prefill.seconds / load.prefill.tokens
    return Factors(given.decode_seconds / found.decode_seconds, share / found.prefill_share)
