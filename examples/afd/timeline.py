"""Draws when attention and experts ran: `python -m examples.afd.timeline timeline.json timeline.svg`."""

import argparse
import hashlib
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from examples.afd.intervals import describe, read_timeline, times

COLOURS = {"A": ("#0b6e4f", "white"), "B": ("#f2c14e", "black")}
"""Of a micro-batch, and of the text on it."""
LANES = tuple((what, slot) for what in ("attention", "experts") for slot in COLOURS)


def draw(timeline: Path, picture: Path) -> None:
    """A lane for each micro-batch's attention and experts, layers numbered; the same file each time."""
    about, intervals = read_timeline(timeline)
    unit, scale = ("ms", 1e3) if times(intervals).wall > 5e-3 else ("µs", 1e6)
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for lane, (what, slot) in enumerate(LANES):
        colour, text = COLOURS[slot]
        for i in (i for i in intervals if (i.what, i.slot) == (what, slot)):
            begin, width = i.begin * scale, (i.end - i.begin) * scale
            axes.broken_barh([(begin, width)], (lane - 0.4, 0.8), color=colour, edgecolor="white")
            middle = begin + width / 2, lane
            axes.annotate(str(i.layer), middle, color=text, fontsize=7, ha="center", va="center")
    axes.set_yticks(range(len(LANES)), [f"{what} {slot}" for what, slot in LANES], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(f"{about['title']}\n{describe(times(intervals))}", fontsize=8)
    source = f"{timeline.name} sha256:{hashlib.sha256(timeline.read_bytes()).hexdigest()}"
    with mpl.rc_context({"svg.hashsalt": "expertd"}):
        figure.savefig(picture, format="svg", metadata={"Date": None, "Source": source})
    plt.close(figure)


def main() -> None:
    """Draw one timeline, and print its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.afd.timeline", description="Draws when attention and experts ran."
    )
    parser.add_argument("timeline", type=Path, help="written by examples.afd.attention --json")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    arguments = parser.parse_args()
    draw(arguments.timeline, arguments.picture)
    print(describe(times(read_timeline(arguments.timeline)[1])))


if __name__ == "__main__":
    main()
