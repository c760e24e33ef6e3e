"""Generates the table of all metrics in docs/monitoring.md.

`python -m expertd.service.engine.metric_table docs/monitoring.md` writes it between the markers;
`--check` only compares.
"""

import sys

from expertd.service.engine import (
    gpu_sensors,
    key_counts,
    lane_metrics,
    metrics,
    placement_metrics,
    queue_metrics,
    rank_metrics,
    request_counts,
    step_metrics,
    use_metrics,
)
from expertd.service.engine.metric_family import Family
from expertd.service.util import tables

FAMILIES: tuple[Family, ...] = (
    *request_counts.FAMILIES,
    *key_counts.FAMILIES,
    *queue_metrics.FAMILIES,
    *step_metrics.FAMILIES,
    *use_metrics.FAMILIES,
    *gpu_sensors.FAMILIES,
    *lane_metrics.FAMILIES,
    *rank_metrics.FAMILIES,
    *placement_metrics.FAMILIES,
    *metrics.FAMILIES,
)


def metric_table() -> str:
    """A Markdown table with one row per metric: name, type, labels, unit, meaning, and when it exists."""
    rows = "".join(
        f"| `{family.shown_name}` | {family.kind} | {', '.join(family.labels)} | {family.unit} "
        f"| {family.text}{f' ({family.when})' if family.when else ''} |\n"
        for family in FAMILIES
    )
    return f"| metric | type | labels | unit | meaning |\n|---|---|---|---|---|\n{rows}"


def replaced(document: str) -> str:
    """`document` with the current table. Raises ValueError if its markers are missing."""
    return tables.replaced(document, "metrics", metric_table())


def main(arguments: list[str] | None = None) -> int:
    """Write the table into a document, or compare; returns the exit code."""
    return tables.run({"metrics": metric_table}, "expertd.service.engine.metric_table", arguments)


if __name__ == "__main__":
    sys.exit(main())
