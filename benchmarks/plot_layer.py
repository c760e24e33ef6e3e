"""Draws a result of benchmarks.moe_layer: `python -m benchmarks.plot_layer RESULT.json PICTURE.svg`.

A bar for every layer and number of tokens, cut into the stages, as shares of what DeepGEMM's two GEMMs alone
take on the same rows (without DeepGEMM in the result: of the whole).
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.moe_layer import STAGES

COLOURS = dict(zip(STAGES, ("#f2c14e", "#f78154", "#0b6e4f", "#5fad56", "#4d9078"), strict=True))
MARK = "#555555"


def draw(result: Path, picture: Path) -> None:
    """Write `picture` (SVG, PNG or PDF by its name) of the rows in `result`."""
    content = json.loads(result.read_text())
    rows = content["rows"]
    mpl.rcParams["svg.hashsalt"] = "expertd"  # the same rows give the same file
    figure, axes = plt.subplots(figsize=(8, 0.5 + 0.28 * len(rows)), layout="constrained")
    beside_peer = all("two_gemms_us" in row for row in rows)
    whole = [row["two_gemms_us" if beside_peer else "us"] for row in rows]
    left = [0.0] * len(rows)
    places = range(len(rows))
    for stage, colour in COLOURS.items():
        shares = [row["stages_us"][stage] / of for row, of in zip(rows, whole, strict=True)]
        axes.barh(places, shares, left=left, color=colour, label=stage, height=0.7)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    if beside_peer:
        axes.axvline(1, color=MARK, linewidth=1)
    axes.set_yticks(places, [f"{row['layer']}, {row['tokens']}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    measure = "that of DeepGEMM's two GEMMs alone" if beside_peer else "the whole layer's"
    axes.set_xlabel(f"time over {measure}", fontsize=9)
    axes.set_title(f"Stages of a layer by tokens, {content['about']['gpu'].split(',')[0]}", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=len(STAGES), loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="what benchmarks.moe_layer wrote with --json")
    parser.add_argument("picture", type=Path, help="SVG, PNG or PDF to write")
    options = parser.parse_args()
    draw(options.result, options.picture)


if __name__ == "__main__":
    main()
