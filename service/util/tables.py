"""Writes generated tables into documents, between the markers `<!-- name -->` and `<!-- /name -->`."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def replaced(document: str, name: str, table: str) -> str:
    """`document` with `table` between its markers. Raises ValueError if they are missing."""
    marks = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin, rest = document.partition(f"{marks[0]}\n")
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"expected {marks[0]} and {marks[1]}, each on a line of its own")
    return f"{before}{begin}{table}{end}{after}"


def run(
    written: Mapping[str, Callable[[], str]],
    module: str,
    arguments: Sequence[str] | None = None,
    in_json: Callable[[str], str] | None = None,
) -> int:
    """The program `python -m MODULE DOCUMENT [--check]`; returns its exit code.

    written  the tables by name
    in_json  writes what they say into a document that is JSON
    """
    parser = argparse.ArgumentParser(
        description=f"Write the table of {' and '.join(written)} into a document."
    )
    parser.add_argument("document", type=Path)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 if it is out of date")
    given = parser.parse_args(arguments)
    text = given.document.read_text(encoding="utf-8")
    if in_json is not None and given.document.suffix == ".json":
        current = in_json(text)
    else:
        current = text
        for name, table in written.items():
            current = replaced(current, name, table())
    if not given.check:
        given.document.write_text(current, encoding="utf-8")
    elif current != text:
        expected = f"the table that `python -m {module} {given.document}` writes"
        print(f"{given.document}: expected {expected}, got another", file=sys.stderr)
        return 1
    return 0
