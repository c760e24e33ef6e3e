"""Draws the result of `benchmarks open_loop`."""

from typing import Any

import matplotlib.pyplot as plt

COLOURS = {"in time": "#3b76af", "refused": "#c8c8c8", "late": "#c44e52"}


def draw(content: dict[str, Any]) -> Any:
    """What became of the requests, by the rate at which they arrived."""
    header, rows, capacity = content["header"], content["rows"], content["capacity"]
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    loads = [f"{row['load']:g}" for row in rows]
    seconds = header["seconds"]
    rates = {
        "in time": [row["goodput"] for row in rows],
        "refused": [row["refused"] / seconds for row in rows],
        "late": [row["late"] / seconds for row in rows],
    }
    base = [0.0] * len(rows)
    for name, values in rates.items():
        axes.bar(loads, values, bottom=base, color=COLOURS[name], label=name, width=0.6)
        base = [low + value for low, value in zip(base, values, strict=True)]
    axes.axhline(capacity, color="black", linewidth=0.8, linestyle=":", label="capacity")
    axes.set_xlabel("requests that arrive, over capacity", fontsize=8)
    axes.set_ylabel("requests/s", fontsize=8)
    axes.tick_params(labelsize=8)
    about = f"deadline {header['deadline_ms']:g} ms, demo layer on {header['cpus']} CPU cores"
    axes.set_title(f"Open loop, {about}", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    return figure
