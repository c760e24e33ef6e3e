"""Generates the table of all metrics in docs/metrics.md.

`python -m expertd.service.engine.metric_table docs/metrics.md` writes it between the markers;
`--check` only compares.
"""

import argparse
import sys
from pathlib import Path

from expertd.service.engine import (
    gpu_sensors,
    key_counts,
    lane_control,
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

BEGIN, END = "<!-- metrics -->", "<!-- /metrics -->"
FAMILIES: tuple[Family, ...] = (
    *request_counts.FAMILIES,
    *key_counts.FAMILIES,
    *queue_metrics.FAMILIES,
    *step_metrics.FAMILIES,
    *use_metrics.FAMILIES,
    *gpu_sensors.FAMILIES,
    *lane_metrics.FAMILIES,
    *lane_control.FAMILIES,
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
    """`document` with the current table. Raises ValueError if the markers are missing."""
    before, begin, rest = document.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}, each on a line of its own")
    return f"{before}{begin}{metric_table()}{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the table of metrics into a document.")
    parser.add_argument("document", type=Path)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 if it is out of date")
    arguments = parser.parse_args()
    text = arguments.document.read_text()
    if not arguments.check:
        arguments.document.write_text(replaced(text))
    elif replaced(text) != text:
        command = f"python -m expertd.service.engine.metric_table {arguments.document}"
        print(
            f"{arguments.document}: expected the table that `{command}` writes, got another", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
