"""Generates the table of all settings in docs/settings.md from `Settings`, and their schema in the chart's.

`python -m expertd.service.settings.table docs/settings.md` writes it between the markers, and with
`deploy/helm/expertd/values.schema.json` the schema; `--check` only compares.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from expertd.service.settings.model import Settings
from expertd.service.util import tables

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
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
    """`document` with the current table. Raises ValueError if its markers are missing."""
    return tables.replaced(document, "settings", settings_table())


def in_chart(document: str) -> str:
    """The schema of the chart's values with that of all settings; those that are false stay the chart's."""
    chart, schema = json.loads(document), Settings.model_json_schema()
    settings = chart["properties"]["settings"]
    of_chart = {name: False for name, within in settings["properties"].items() if within is False}
    settings["properties"] = _checked(schema, schema["$defs"])["properties"] | of_chart
    settings["additionalProperties"] = False
    return f"{json.dumps(chart, indent=2)}\n"


def _checked(field: _Schema, definitions: _Schema) -> _Schema:
    """What a schema refuses in YAML: no texts, which may be written as numbers, and names in any case."""
    if "$ref" in field:
        return _checked(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in field:
        options = [_checked(one, definitions) for one in field["anyOf"]]
        return {} if {} in options else {"anyOf": options}
    if "enum" in field:
        return {"enum": list(dict.fromkeys(form for value in field["enum"] for form in _forms(value)))}
    if field.get("type") == "string":
        return {}
    checked = {key: field[key] for key in ("type", "required", *_BOUNDS) if key in field}
    for key in ("items", "additionalProperties"):
        if isinstance(within := field.get(key), dict):
            checked[key] = _checked(within, definitions)
        elif within is not None:
            checked[key] = within
    if "properties" in field:
        checked["properties"] = {
            name: _checked(each, definitions) for name, each in field["properties"].items()
        }
    return checked


def _forms(value: Any) -> list[Any]:
    return [value, value.upper()] if isinstance(value, str) else [value]


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


def main(arguments: list[str] | None = None) -> int:
    """Write the table into a document, or compare; returns the exit code."""
    return tables.run({"settings": settings_table}, "expertd.service.settings.table", arguments, in_chart)


if __name__ == "__main__":
    sys.exit(main())
