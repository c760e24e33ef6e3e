"""Numbers and ranges in settings: 3, 3-5, or 3-5,9."""

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

ALL = "all"

_SPAN = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def numbers(spans: str) -> list[int]:
    """The numbers in a text: 3, 4, 5, 9 for "3-5,9". Raises ValueError for any other form."""
    named: list[int] = []
    for text in spans.split(","):
        span = _SPAN.fullmatch(text)
        if span is None:
            raise ValueError(f"expected numbers and ranges like 3, 3-5 or 3-5,9, got {spans!a:.80}")
        first, last = int(span[1]), int(span[2] or span[1])
        if last < first:
            raise ValueError(f"expected ranges from a lower to a higher number, got {text}")
        named.extend(range(first, last + 1))
    if len(set(named)) < len(named):
        raise ValueError(f"expected each number once, got {spans:.80}")
    return named


def spans(named: Iterable[int]) -> str:
    """The inverse of `numbers`: "3-5,9" for 3, 4, 5, 9."""
    runs: list[list[int]] = []
    for number in sorted(named):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _to_text(value: object) -> object:
    """YAML parses 3 as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked(spans: str) -> str:
    numbers(spans)
    return spans


def _checked_one(span: str) -> str:
    if _SPAN.fullmatch(span) is None:
        raise ValueError(f"expected one range like 0-63, got {span!a:.80}")
    return _checked(span)


def _checked_layers(layers: str) -> str:
    if layers.lower() == ALL:
        return ALL
    if any(_SPAN.fullmatch(text) is None for text in layers.split(",")):
        raise ValueError(f"expected all, or numbers and ranges like 3, 3-5 or 3-5,9, got {layers!a:.80}")
    return _checked(layers)


def _list_to_text(value: object) -> object:
    """YAML parses [0, 1] as a list."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else _to_text(value)


Range = Annotated[str, BeforeValidator(_to_text), AfterValidator(_checked_one)]
Layers = Annotated[str, BeforeValidator(_to_text), AfterValidator(_checked_layers)]
Devices = Annotated[str, BeforeValidator(_list_to_text), AfterValidator(_checked)]
