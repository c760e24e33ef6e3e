"""Writes the sweep's result, and the grouped GEMMs' energy, as Markdown: functions for report_sections."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.gemm.gemm_sweep import GOAL
from benchmarks.gemm.heat_map import worst
from benchmarks.lib.markdown import paragraph, span, table
from benchmarks.ranks.parallel_sections import NOT_MEASURED

RESULT, PICTURE = "gemm_sweep-h200.json", "../gemm_sweep-h200.svg"


def gemm_sweep_machine(results: Path) -> str:
    """The machine and versions of the sweep."""
    if not (results / RESULT).exists():
        return NOT_MEASURED
    about = json.loads((results / RESULT).read_text())["about"]
    gpu, driver, *_ = str(about["gpu"]).split(", ")
    return paragraph(
        f"{gpu}, driver {driver}, NVRTC {about['nvrtc']}, torch {about['torch']}; "
        f"a copy moved {about['copy_tbps']:.2f} TB/s; DeepGEMM: sgl-deep-gemm {about['deep_gemm']}."
    )


def gemm_sweep(results: Path) -> str:
    """The sweep by layout and number of groups, and its picture."""
    if not (results / RESULT).exists():
        return NOT_MEASURED
    rows = json.loads((results / RESULT).read_text())["rows"]
    cells = []
    for layout, groups in dict.fromkeys((row["layout"], row["groups"]) for row in rows):
        speeds = [row["speed"] for row in rows if (row["layout"], row["groups"]) == (layout, groups)]
        cells.append(
            (
                layout, groups, len(speeds), f"{statistics.geometric_mean(speeds):.2f}",
                span(speeds), sum(speed < GOAL for speed in speeds),
            )
        )  # fmt: skip
    columns = ("layout", "groups", "points", "speed, geometric mean", "worst to best", f"below {GOAL}")
    picture = f"![speed over DeepGEMM by rows of a group and N x K, the worst points numbered]({PICTURE})"
    return f"{table(columns, cells)}\n\n{picture}"


def gemm_sweep_worst(results: Path) -> str:
    """The points that the picture numbers."""
    if not (results / RESULT).exists():
        return NOT_MEASURED
    rows = worst(json.loads((results / RESULT).read_text())["rows"])
    cells = [
        (
            place, row["layout"], row["groups"], row["rows"], row["n"], row["k"],
            f"{row['us']:.1f}", f"{row['deep_gemm_us']:.1f}", f"{row['speed']:.2f}",
        )
        for place, row in enumerate(rows, 1)
    ]  # fmt: skip
    columns = ("", "layout", "groups", "rows", "N", "K", "ours, µs", "DeepGEMM, µs", "speed")
    return table(columns, cells)


def grouped_gemm_power(results: Path) -> str:
    """The energy of the largest shapes in a loop."""
    return _power(results, "loop")


def grouped_gemm_power_cold(results: Path) -> str:
    """The energy of the largest shapes as single launches on a cold L2."""
    return _power(results, "cold")


def grouped_gemm_peers(results: Path) -> str:
    """Our speed over the other implementations, by band of shapes."""
    rows = json.loads((results / "grouped_gemm-h200.json").read_text())["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("peers_us", {})))
    if not names:
        return NOT_MEASURED
    cells = []
    for band in dict.fromkeys(row["band"] for row in rows):
        of_band = [row for row in rows if row["band"] == band]
        speeds = [
            [row["peers_us"][name] / row["us"] for row in of_band if name in row.get("peers_us", {})]
            for name in names
        ]
        cells.append((band, *(_mean_and_span(of_peer) for of_peer in speeds)))
    return table(("speed over", *names), cells)


def _mean_and_span(speeds: list[float]) -> str:
    return f"{statistics.geometric_mean(speeds):.2f} ({span(speeds)})" if speeds else ""


def _power(results: Path, case: str) -> str:
    rows = json.loads((results / "grouped_gemm-h200.json").read_text())["rows"]
    measured = [row for row in rows if "deep_gemm" in row.get("power", {}).get(case, {})]
    if not measured:
        return NOT_MEASURED
    columns = (
        "shape", "ours, µs", "DeepGEMM", "W", "DeepGEMM", "MHz", "DeepGEMM", "pJ/FLOP", "DeepGEMM", "ratio",
    )  # fmt: skip
    return table(columns, [_power_cells(row["shape"], row["power"][case]) for row in measured])


def _power_cells(shape: str, figures: dict[str, Any]) -> tuple[str, ...]:
    ours, theirs = figures["ours"], figures["deep_gemm"]
    return (
        shape, f"{ours['us']:.0f}", f"{theirs['us']:.0f}", f"{ours['watts']:.0f}", f"{theirs['watts']:.0f}",
        f"{ours['mhz']:.0f}", f"{theirs['mhz']:.0f}",
        f"{ours['pj_per_flop']:.3f}", f"{theirs['pj_per_flop']:.3f}",
        f"{ours['pj_per_flop'] / theirs['pj_per_flop']:.3f}",
    )  # fmt: skip
