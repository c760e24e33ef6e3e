"""When attention and experts ran, what that amounts to, and the file that keeps it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

_Span = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A micro-batch's attention, or experts with the way there and back, in one layer; in seconds."""

    what: Literal["attention", "experts"]
    slot: str
    layer: int
    begin: float
    end: float


@dataclass(frozen=True)
class Times:
    """Seconds in which attention, experts, or both ran, for any micro-batch; wall: from begin to end."""

    attention: float
    experts: float
    both: float
    wall: float

    @property
    def overlap(self) -> float:
        """The part of the shorter one that ran under the other: 0 in turns, 1 completely."""
        return self.both / min(self.attention, self.experts)

    @property
    def saved(self) -> float:
        """1 - wall / (attention + experts): at most 0.5, negative if neither ran for long."""
        return 1 - self.wall / (self.attention + self.experts)


def times(intervals: Sequence[Interval]) -> Times:
    """What a run's intervals amount to; must have both kinds."""
    busy = {what: _union(i for i in intervals if i.what == what) for what in ("attention", "experts")}
    both = sum(
        max(0.0, min(a_end, e_end) - max(a_begin, e_begin))
        for a_begin, a_end in busy["attention"]
        for e_begin, e_end in busy["experts"]
    )
    attention, experts = (sum(end - begin for begin, end in spans) for spans in busy.values())
    wall = max(i.end for i in intervals) - min(i.begin for i in intervals)
    return Times(attention, experts, both, wall)


def describe(measured: Times) -> str:
    """A line of figures."""
    return (
        f"wall {measured.wall * 1e3:.3f} ms, attention {measured.attention * 1e3:.3f} ms, "
        f"experts {measured.experts * 1e3:.3f} ms, overlap {measured.overlap:.0%}, saved {measured.saved:.0%}"
    )


def write_timeline(file: Path, about: dict[str, Any], intervals: Sequence[Interval]) -> None:
    """Write what `read_timeline` reads; times count from the first begin."""
    first = min(i.begin for i in intervals)
    moved = [asdict(i) | {"begin": i.begin - first, "end": i.end - first} for i in intervals]
    file.write_text(json.dumps({"about": about, "intervals": moved}, indent=1) + "\n")


def read_timeline(file: Path) -> tuple[dict[str, Any], list[Interval]]:
    """(about, intervals)."""
    content = json.loads(file.read_text())
    return content["about"], [Interval(**entry) for entry in content["intervals"]]


def _union(intervals: Iterable[Interval]) -> list[_Span]:
    """The times that any of them covers, in order."""
    spans: list[_Span] = []
    for begin, end in sorted((i.begin, i.end) for i in intervals):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans
