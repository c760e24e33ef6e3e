"""Writes the results of `benchmarks.parallel` as Markdown."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import paragraph, span, table


def parallel_machine(results: Path) -> str:
    """The machine and versions."""
    about = _content(results)["about"]
    name, driver = about["gpu"].split("\n")[0].split(", ")[:2]
    return paragraph(
        f"{about['ranks']} GPUs of one host: {name}, driver {driver}, NVRTC {about['nvrtc']}, torch "
        f"{about['torch']}."
    )


def parallel(results: Path) -> str:
    """Every row."""
    return table(
        (
            "layer", "tokens a GPU", "dispatch and combine alone", "one GPU, the same work", "whole layer",
            "added", "Mega MoE", "whole layer over it",
        ),
        [
            (
                row["layer"], row["tokens"], f"{row['exchange_us']:.0f}", f"{row['one_gpu_us']:.0f}",
                f"{row['layer_us']:.0f}", f"{row['layer_us'] - row['one_gpu_us']:.0f}",
                f"{row['mega_moe_us']:.0f}", f"{row['over_mega_moe']:.2f}",
            )
            for row in _content(results)["rows"]
        ],
    )  # fmt: skip


def parallel_headline(results: Path) -> str:
    """The whole layer against Mega MoE, in a sentence."""
    ratios = [row["over_mega_moe"] for row in _content(results)["rows"]]
    slower = sum(ratio > 1 for ratio in ratios)
    return paragraph(
        f"The whole layer takes {statistics.geometric_mean(ratios):.2f} times as long as SM90 Mega MoE (the "
        f"geometric mean of {len(ratios)} rows, {span(ratios)}); in {slower} of them it is slower."
    )


def _content(results: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / "parallel-h200.json").read_text())
    return content
