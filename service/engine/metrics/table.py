"""Generates the table of all metrics in docs/monitoring.md.

`python -m expertd.service.engine.metrics.table docs/monitoring.md` writes it between the markers;
`--check` only compares.
"""

import sys

from expertd.service.engine import metrics
from expertd.service.engine.metrics import device, ranks, requests, steps
from expertd.service.engine.metrics.family import MetricFamily
from expertd.service.util import tables

FAMILIES: tuple[MetricFamily, ...] = (
    *requests.FAMILIES,
    *steps.FAMILIES,
    *device.FAMILIES,
    *steps.LANE_FAMILIES,
    *ranks.FAMILIES,
    *metrics.FAMILIES,
)


def metric_table() -> str:
    """A Markdown table with one row per metric: name, type, labels, meaning, and when it exists."""
    rows = "".join(
        f"| `{family.shown_name}` | {family.kind} | {', '.join(family.labels)} "
        f"| {family.text}{f' ({family.where})' if family.where else ''} |\n"
        for family in FAMILIES
    )
    return f"| metric | type | labels | meaning |\n|---|---|---|---|\n{rows}"


def replaced(document: str) -> str:
    """`document` with the current table. Raises ValueError if its markers are missing."""
    return tables.replaced(document, "metrics", metric_table())


def main(arguments: list[str] | None = None) -> int:
    """Write the table into a document, or compare; returns the exit code."""
    return tables.run({"metrics": metric_table}, "expertd.service.engine.metrics.table", arguments)


if __name__ == "__main__":
    sys.exit(main())
