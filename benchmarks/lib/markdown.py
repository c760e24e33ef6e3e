"""Formats paragraphs and tables for the documents."""

import textwrap
from collections.abc import Iterable, Sequence

_LINE = 118


def paragraph(text: str) -> str:
    """`text`, wrapped at the documents' line length."""
    return textwrap.fill(text, _LINE, break_long_words=False, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A header line with the columns' names, and a line for each row."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def percent(shares: Sequence[float]) -> str:
    """The least and the most of them."""
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f}%"


def span(ratios: Sequence[float]) -> str:
    """The least and the most of them."""
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
