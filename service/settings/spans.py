"""Numbers as people name them in settings: 3, 3-5, or 3-5,9."""

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

_SPAN = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def numbers(spans: str) -> list[int]:
    """What "3-5,9" names: 3, 4, 5, 9. Raises ValueError for anything of another form."""
    named: list[int] = []
    for text in spans.split(","):
        span = _SPAN.fullmatch(text)
        if span is None:
            raise ValueError(f"numbers and ranges like 3, 3-5 or 3-5,9 are expected, got {spans!a:.80}")
        first, last = int(span[1]), int(span[2] or span[1])
        if last < first:
            raise ValueError(f"ranges from a lower to a higher number are expected, got {text}")
        named.extend(range(first, last + 1))
    if len(set(named)) < len(named):
        raise ValueError(f"each number is expected once, got {spans:.80}")
    return named


def spans(named: Iterable[int]) -> str:
    """ "3-5,9" for 3, 4, 5, 9: the other way round."""
    runs: list[list[int]] = []
    for number in sorted(named):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _to_text(value: object) -> object:
    """YAML and the environment make a number of 3."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked(spans: str) -> str:
    numbers(spans)
    return spans


def _checked_one(span: str) -> str:
    if "," in span:
        raise ValueError(f"one range like 0-63 is expected, got {span:.80}")
    return _checked(span)


Span = Annotated[str, BeforeValidator(_to_text), AfterValidator(_checked_one)]
Spans = Annotated[str, BeforeValidator(_to_text), AfterValidator(_checked)]
