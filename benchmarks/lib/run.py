"""What benchmarks have in common: a command line with --json, and a result with rows."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark; text: its module's."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the machine and all rows here")
    return made


def earlier(file: Path | None) -> list[Row]:
    """The rows that a file has, if there is one."""
    rows: list[Row] = json.loads(file.read_text())["rows"] if file is not None and file.exists() else []
    return rows


@dataclass
class Result:
    """What was measured where. Each row is printed and in the file at once: an interrupted run leaves some.

    file   None: it is not written
    about  the machine, the versions and the method
    rows   a row replaces that with the same values of `keys`, if there are keys; of older rows without a
           value, `defaults` counts
    """

    file: Path | None
    about: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    keys: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        print(line_of(self.about), flush=True)

    def put(self, row: Row) -> None:
        """Add a row, or replace one, and print it."""
        same = (
            place
            for place, old in enumerate(self.rows)
            if self.keys and all(old.get(key, self.defaults.get(key)) == row[key] for key in self.keys)
        )
        place = next(same, len(self.rows))
        self.rows[place : place + 1] = [row]
        print(line_of(row), flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        """Write it, with more than rows."""
        if self.file is not None:
            content = {"about": self.about, "rows": self.rows, **more}
            self.file.write_text(json.dumps(content, indent=1) + "\n")


def line_of(row: Mapping[str, Any]) -> str:
    """A row as text: its keys and values, floats rounded."""
    return "  ".join(f"{key} {_text(value)}" for key, value in row.items())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {_text(each)}' for key, each in value.items())})"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list | tuple) else str(value)
