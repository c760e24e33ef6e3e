"""Generates the table of all settings in docs/settings.md from `Settings`.

`python -m expertd.service.settings.table docs/settings.md` writes it between the markers;
`--check` only compares.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expertd.service.settings.model import Settings

BEGIN, END = "<!-- settings -->", "<!-- /settings -->"
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
}
_KINDS = {"array": "list", "string": "text", "boolean": "true or false", "path": "path"}
_Schema = dict[str, Any]


def settings_table() -> str:
    """A Markdown table with one row per setting: name, type, default, meaning."""
    schema = Settings.model_json_schema()
    rows = "".join(f"| {' | '.join(row)} |\n" for row in _rows(schema, schema.get("$defs", {}), ""))
    return f"| setting | type | default | meaning |\n|---|---|---|---|\n{rows}"


def replaced(document: str) -> str:
    """`document` with the current table. Raises ValueError if the markers are missing."""
    before, begin, rest = document.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}, each on a line of its own")
    return f"{before}{begin}{settings_table()}{end}{after}"


def _rows(schema: _Schema, definitions: _Schema, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in schema["properties"].items():
        nested = _nested(field, definitions)
        key = f"{prefix}{name}"
        if nested is not None and field.get("type") != "array":
            yield from _rows(nested, definitions, f"{key}.")
            continue
        default = (
            "required" if name in schema.get("required", ()) else f"`{json.dumps(field.get('default'))}`"
        )
        yield f"`{key}`", _type(field), default, field.get("description", "")
        if nested is not None:
            yield from _rows(nested, definitions, f"{key}.N.")


def _nested(field: _Schema, definitions: _Schema) -> _Schema | None:
    """The schema of the nested settings, of a mapping or of each entry of a list; None if there are none."""
    reference = field.get("items", field).get("$ref", "")
    found: _Schema | None = definitions.get(reference.rpartition("/")[2])
    return found


def _type(field: _Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "object":
        return f"mapping of names to {_type(field['additionalProperties'])}s"
    kind = _KINDS.get(str(field.get("format", field["type"])), str(field["type"]))
    bounds = [text.format(_number(field[name])) for name, text in _BOUNDS.items() if name in field]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def _number(bound: float) -> str:
    return "2^63 - 1" if bound == 2**63 - 1 else f"{bound:.15g}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the table of settings into a document.")
    parser.add_argument("document", type=Path)
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 if it is out of date")
    arguments = parser.parse_args()
    text = arguments.document.read_text()
    if not arguments.check:
        arguments.document.write_text(replaced(text))
    elif replaced(text) != text:
        command = f"python -m expertd.service.settings.table {arguments.document}"
        print(
            f"{arguments.document}: expected the table that `{command}` writes, got another", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
