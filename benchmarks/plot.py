"""Draws a result of benchmarks.grouped_gemm: `python -m benchmarks.plot RESULT.json PICTURE.svg`.

A roofline: operations a byte against TFLOPS, ours and DeepGEMM's, under the run's copy bandwidth and the
tensor cores' rate that the floor assumes.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.grouped_gemm import PEAK_TFLOPS

OURS, THEIRS, ROOF = "#0b6e4f", "#c1666b", "#555555"


def draw(result: Path, picture: Path) -> None:
    """Write `picture` (SVG, PNG or PDF by its name) of the rows in `result`."""
    content = json.loads(result.read_text())
    rows, bandwidth = content["rows"], content["about"]["copy_tbps"]
    intensity = [row["tflops"] / row["tbps"] for row in rows]
    mpl.rcParams["svg.hashsalt"] = "expertd"  # the same rows give the same file
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    knee = PEAK_TFLOPS / bandwidth
    ends = [min(intensity) / 1.3, knee, max(intensity) * 1.3]
    axes.plot(ends, [min(x * bandwidth, PEAK_TFLOPS) for x in ends], color=ROOF, linewidth=1)
    axes.annotate(
        f"{bandwidth:.2f} TB/s", (knee / 4, knee / 4 * bandwidth * 1.35), color=ROOF, fontsize=8, ha="right"
    )
    axes.annotate(f"{PEAK_TFLOPS:.0f} TFLOPS", (knee * 3, PEAK_TFLOPS * 1.05), color=ROOF, fontsize=8)
    if all("deep_gemm_us" in row for row in rows):
        theirs = [row["tflops"] * row["us"] / row["deep_gemm_us"] for row in rows]
        axes.scatter(intensity, theirs, s=16, color=THEIRS, marker="x", linewidths=1, label="DeepGEMM")
    axes.scatter(intensity, [row["tflops"] for row in rows], s=14, color=OURS, label="expertd")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOPS over real rows")
    axes.set_title(
        f"Grouped FP8 GEMMs, {content['about']['gpu'].split(',')[0]}, {len(rows)} shapes", fontsize=10
    )
    axes.grid(which="both", linewidth=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="what benchmarks.grouped_gemm wrote with --json")
    parser.add_argument("picture", type=Path, help="SVG, PNG or PDF to write")
    options = parser.parse_args()
    draw(options.result, options.picture)


if __name__ == "__main__":
    main()
