"""Writes and draws the results of `benchmarks lanes`: decode's times against prefill's rate."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.lib.markdown import paragraph, table

Row = dict[str, Any]
NOT_MEASURED = "Not measured yet."
STYLES = {"turns": "o-C3", "joined": "s-C1", "lanes": "^-C2", "no server": "x:C7"}
"""Markers by the first word of a way."""


def lanes_machine(results: Path) -> str:
    """The machine and versions."""
    if (content := _content(results)) is None:
        return NOT_MEASURED
    about = content["header"]
    name, driver = about["gpu"].split("\n")[0].split(", ")[:2]
    return paragraph(f"{name}, driver {driver}, torch {about['torch']}, Python {about['python']}.")


def lanes(results: Path) -> str:
    """A table for each layer, with a line for each way."""
    if (content := _content(results)) is None:
        return NOT_MEASURED
    rows: list[Row] = content["rows"]
    return "\n\n".join(layer_table(rows, name) for name in dict.fromkeys(row["layer"] for row in rows))


def layer_table(rows: list[Row], layer: str) -> str:
    """p50, p99 and the prefill's share of every way, for each number of decode tokens."""
    of = {
        (row["way"], row["decode_tokens"]): row
        for row in rows
        if row["layer"] == layer and row["decode_tokens"]
    }
    tokens = sorted({count for _, count in of}, reverse=True)
    ways = dict.fromkeys(way for way, _ in of)
    columns = [name for count in tokens for name in (f"{count}: p50, µs", "p99, µs", "prefill")]
    cells = [(way, *(cell for count in tokens for cell in _cells(of.get((way, count))))) for way in ways]
    return table((f"{layer}, decode tokens", *columns), cells)


def draw_lanes(content: dict[str, Any]) -> Any:
    """A panel for each layer and number of decode tokens: p99 by the prefill's share."""
    rows = [row for row in content["rows"] if row["decode_tokens"] and row["prefill_share"]]
    panels = list(dict.fromkeys((row["layer"], row["decode_tokens"]) for row in rows))
    columns = min(2, len(panels))
    count = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        count, columns, figsize=(9, 2.6 * count + 0.6), squeeze=False, layout="constrained"
    )
    for axes, (layer, tokens) in zip(grid.flat, panels, strict=False):
        for kind, style in STYLES.items():
            of_kind = [
                row
                for row in rows
                if (row["layer"], row["decode_tokens"]) == (layer, tokens) and row["way"].startswith(kind)
            ]
            of_kind.sort(key=lambda row: float(row["prefill_share"]))
            shares = [row["prefill_share"] for row in of_kind]
            axes.plot(shares, [row["p99_us"] / 1e3 for row in of_kind], style, label=kind, markersize=4)
        axes.set_title(f"{layer}, decode steps of {tokens}", fontsize=9)
        axes.set_yscale("log")
        axes.set_xlim(0, 1.05)
        axes.set_xlabel("prefill's rate over its rate alone", fontsize=8)
        axes.set_ylabel("decode p99, ms", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    gpu = str(content["header"]["gpu"]).split(",")[0]
    figure.suptitle(f"Decode beside prefill on one {gpu}: lower and further right is better", fontsize=10)
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(labels), loc="outside lower center")
    return figure


def _content(results: Path) -> dict[str, Any] | None:
    file = results / "lanes-h200.json"
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _cells(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    share = "" if row["prefill_share"] is None else f"{row['prefill_share']:.2f}"
    return f"{row['p50_us']:.0f}", f"{row['p99_us']:.0f}", share
