"""Writes results as the paragraphs and tables of the documents.

A cell is a format of its row, as in "{us:.1f}", or a function of it.
"""

import functools
import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Cell = str | Callable[[Row], object]
Columns = Mapping[str, Cell] | Sequence[tuple[str, Cell]]
Section = Callable[[Path], str]
"""Writes a section of a document from the folder of results."""

NOT_MEASURED = "Not measured yet."
_LINE = 118


def read(results: Path, name: str) -> dict[str, Any]:
    """A result. Raises FileNotFoundError if it is not there; a section is `NOT_MEASURED` then."""
    content: dict[str, Any] = json.loads((results / name).read_text())
    return content


def measured(section: Section) -> Section:
    """The section, or that it is not measured, for want of a result."""

    @functools.wraps(section)
    def write(results: Path) -> str:
        try:
            return section(results) or NOT_MEASURED
        except FileNotFoundError:
            return NOT_MEASURED

    return write


def about(name: str, text: str) -> Section:
    """A paragraph: a format of what the result `name` says of the machine; gpu and driver are its first."""

    def write(results: Path) -> str:
        return paragraph(text.format_map(machine(read(results, name)["about"])))

    return write


def machine(about: Mapping[str, Any]) -> Row:
    """What a result says of the machine, with the name of the GPU, and its driver's version."""
    if "gpu" not in about:
        return dict(about)
    name, driver, *_ = (*str(about["gpu"]).split("\n")[0].split(", "), "")
    return {**about, "gpu": name, "driver": driver}


def written(name: str, columns: Columns, of: str = "rows", missing: str = "") -> Section:
    """A table: a line for each row of the result `name`."""
    return lambda results: lines(read(results, name)[of], columns, missing)


def lines(rows: Sequence[Row], columns: Columns, missing: str = "") -> str:
    """A line for each row; cells without a value are `missing`. Empty without rows."""
    pairs = list(columns.items() if isinstance(columns, Mapping) else columns)
    cells = [[cell(each, row, missing) for _, each in pairs] for row in rows]
    return table([name for name, _ in pairs], cells) if cells else ""


def pivot(
    rows: Sequence[Row],
    of_line: Sequence[str],
    of_column: Sequence[str],
    *cells: Cell,
    order: Iterable[tuple[Any, ...]] | None = None,
    missing: str = "",
) -> list[tuple[object, ...]]:
    """A line for each value of these keys, which come first, and cells for each value of those of a column.

    order  of the columns; None: as they come
    """
    found = {(_values(row, of_line), _values(row, of_column)): row for row in rows}
    columns = list(dict.fromkeys(column for _, column in found) if order is None else order)
    return [
        (*line, *(cell(each, found.get((line, column)), missing) for column in columns for each in cells))
        for line in dict.fromkeys(line for line, _ in found)
    ]


def by(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows, by the values of these keys."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_values(row, keys), []).append(row)
    return groups


def cell(of: Cell, row: Row | None, missing: str = "") -> object:
    """A cell of a row, which may be absent, or have no value."""
    try:
        if row is None:
            return missing
        return of.format_map(row) if isinstance(of, str) else of(row)
    except (KeyError, TypeError):
        return missing


def paragraph(text: str) -> str:
    """`text`, wrapped at the documents' line length."""
    return textwrap.fill(text, _LINE, break_long_words=False, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A header line with the columns' names, and a line for each row."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return statistics.geometric_mean(values)


def span(ratios: Sequence[float]) -> str:
    """The least and the most of them."""
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _values(row: Row, keys: Iterable[str]) -> tuple[Any, ...]:
    return tuple(row[key] for key in keys)
