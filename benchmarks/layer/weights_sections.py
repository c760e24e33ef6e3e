"""Writes the results of `benchmarks weights` as Markdown."""

import json
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import paragraph, table

_CACHES = ("cold", "warm")


def weights_machine(results: Path) -> str:
    """The machines, storages and versions of all results."""
    return "\n\n".join(paragraph(_machine(content["about"])) for content in _contents(results))


def weights(results: Path) -> str:
    """GB/s of each way, one table for each result."""
    return "\n\n".join(_table(content["rows"]) for content in _contents(results))


def _contents(results: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(results.glob("weights-*.json"))]


def _machine(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    device = "to the CPU" if about["device"] == "cpu" else f"to an {about['device']}"
    return f"{about['machine']}, {about['storage']}, {device}; {versions}; {about['rounds']} rounds."


def _table(rows: list[dict[str, Any]]) -> str:
    sizes, ways = (list(dict.fromkeys(row[key] for row in rows)) for key in ("sizes", "way"))
    found = {(row["way"], row["sizes"], row["cache"]): row for row in rows}
    cases = [(size, cache) for size in sizes for cache in _CACHES]
    cells = [(way, *(_cell(found[way, *case]) for case in cases)) for way in ways]
    return table(("GB/s, s of processor", *(", ".join(case) for case in cases)), cells)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['GB/s']:.2f} ({row['low']:.2f} to {row['high']:.2f}), {row['cpu']:.1f}"
