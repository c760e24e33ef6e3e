"""Numbers as people name them in settings: 3, 3-5, or 3-5,9."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

_SPAN = r"\d{1,6}(-\d{1,6})?"


def numbers(spans: str) -> list[int]:
    """What "3-5,9" names: 3, 4, 5, 9. Raises ValueError for a range that goes down."""
    named: list[int] = []
    for span in spans.split(","):
        first, last = (int(bound) for bound in (span.split("-") * 2)[:2])
        if last < first:
            raise ValueError(f"ranges from a lower to a higher number are expected, got {span}")
        named.extend(range(first, last + 1))
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


Span = Annotated[str, BeforeValidator(_to_text), Field(pattern=f"^{_SPAN}$"), AfterValidator(_checked)]
Spans = Annotated[
    str, BeforeValidator(_to_text), Field(pattern=f"^{_SPAN}(,{_SPAN})*$"), AfterValidator(_checked)
]
