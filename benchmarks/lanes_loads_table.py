"""Writes the rows of `benchmarks.lanes_loads`."""

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import table


def loads_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each load."""
    cells = []
    for row in rows:
        sms, chunk = row["best"]
        best = f"{sms} SMs for decode" if sms else f"joined, chunks of {chunk}" if chunk else "joined"
        ratio = row["chosen_worth"] / row["best_worth"]
        cells.append(
            (
                row["layer"],
                f"{row['target_ms']:g}",
                row["load"],
                best,
                f"{row['best_worth']:.2f}",
                f"{row['chosen_worth']:.2f}",
                f"{ratio:.2f}",
            )
        )
    columns = ("layer", "target, ms", "load", "best fixed choice", "its worth", "the server's", "ratio")
    return table(columns, cells)
