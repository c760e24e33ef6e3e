"""Writes the layer beside other implementations as Markdown, for report_sections."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import paragraph, table
from benchmarks.ranks.parallel_sections import NOT_MEASURED


def layer_peers(results: Path) -> str:
    """Every row of the layer's benchmark, the mean ratios, and the other implementations' versions."""
    content = json.loads((results / "moe_layer-h200.json").read_text())
    rows = content["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("peers_us", {})))
    if not names:
        return NOT_MEASURED
    cells = [
        (row["layer"], row["tokens"], f"{row['us']:.1f}", *(_beside(row, name) for name in names))
        for row in rows
    ]
    means = (f"({_mean_ratio(rows, name):.2f})" for name in names)
    beside = table(("layer", "tokens", "ours", *names), [*cells, ("geometric mean", "", "", *means)])
    return f"{beside}\n\n{_versions(content['about']['peers'], names)}"


def _beside(row: dict[str, Any], name: str) -> str:
    us = row.get("peers_us", {}).get(name)
    return "" if us is None else f"{us:.1f} ({row['us'] / us:.2f})"


def _mean_ratio(rows: Iterable[dict[str, Any]], name: str) -> float:
    measured = [row for row in rows if name in row.get("peers_us", {})]
    return statistics.geometric_mean(row["us"] / row["peers_us"][name] for row in measured)


def _versions(peers: dict[str, Any], names: Iterable[str]) -> str:
    said = []
    for name in names:
        tuned = peers[name].get("tuned")
        of_layers = "" if tuned is None else f", tuned for {', '.join(tuned) or 'none of these layers'}"
        said.append(f"{name}: {peers[name]['version']}{of_layers}")
    return paragraph("; ".join(said) + ".")
