"""Writes the results of `benchmarks serving` for one GPU and for several, side by side, as Markdown."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import table
from benchmarks.ranks.parallel_sections import NOT_MEASURED

Row = dict[str, Any]
Case = tuple[str, str | None, int, int]
"""The way, the device of the tensors, the callers, and the tokens of each request."""

WAYS = {
    ("http", None): "HTTP",
    ("shared memory", None): "shared memory of the host",
    ("shared memory", "cuda:0"): "shared memory of a GPU of the server",
    ("channel", None): "channel, memory of the host",
    ("channel", "cuda:0"): "channel, memory of a GPU of the server",
}
FILES = {
    1: "serving-1xh200.json",
    2: "serving-2xh200.json",
    4: "serving-4xh200.json",
    8: "serving-8xh200.json",
}


def serving_ranks(results: Path) -> str:
    """The median times of one caller, in us, by the number of GPUs."""
    times = _values(results, "p50_us", lambda callers: callers == 1)
    return _compared(times, ("tokens",), lambda one, most: one / most)


def serving_ranks_callers(results: Path) -> str:
    """The rates of several callers, in tokens a second, by the number of GPUs."""
    rates = _values(results, "tokens_per_second", lambda callers: callers > 1)
    return _compared(rates, ("callers", "tokens of each request"), lambda one, most: most / one)


def _values(results: Path, field: str, wanted: Callable[[int], bool]) -> dict[int, dict[Case, float]]:
    """A field of every row, by the number of GPUs."""
    found = {}
    for gpus, name in FILES.items():
        if (file := results / name).exists():
            rows: list[Row] = json.loads(file.read_text())["rows"]
            found[gpus] = {
                (row["way"], row["device"], row["callers"], row["tokens"]): row[field]
                for row in rows
                if row["http_workers"] == 1 and wanted(row["callers"]) and (row["way"], row["device"]) in WAYS
            }
    return found


def _compared(
    values: dict[int, dict[Case, float]], load: Sequence[str], gain: Callable[[float, float], float]
) -> str:
    """A row for each case that several GPUs have been measured for; load: the names of its columns."""
    most = max(values, default=1)
    if most == 1:
        return NOT_MEASURED
    cases = {case for gpus, of_gpus in values.items() if gpus > 1 for case in of_gpus}
    cells = []
    for case in sorted(cases, key=lambda case: (list(WAYS).index(case[:2]), case[2:])):
        way, device, *numbers = case
        of_case = [of_gpus.get(case) for of_gpus in values.values()]
        first, last = of_case[0], of_case[-1]
        ratio = "-" if first is None or last is None else f"{gain(first, last):.2f}"
        shown = ("-" if value is None else f"{value:.0f}" for value in of_case)
        cells.append((WAYS[way, device], *numbers[-len(load) :], *shown, ratio))
    names = [f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in values]
    return table(("way", *load, *names, f"faster on {most}"), cells)
