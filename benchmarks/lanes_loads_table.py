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
        worths = row["best_worth"], row["chosen_worth"], row["chosen_worth"] / row["best_worth"]
        late = (f"{100 * row[key]:.0f}%" for key in ("best_late", "chosen_late"))
        cells.append(
            (
                row["layer"],
                f"{row['target_ms']:g}",
                row["load"],
                best,
                *(f"{each:.2f}" for each in worths),
                *late,
            )
        )
    columns = (
        "layer", "target, ms", "load", "best fixed choice", "its worth", "the server's", "ratio",
        "decode late, best", "the server's",
    )  # fmt: skip
    return table(columns, cells)
