"""Reads config.json; every invalid value is reported in one sentence."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertd.limits import SCALE_BLOCK
from expertd.service.util.files import check_readable, read_text
from expertd.service.util.sentences import any_of, shown

_MAX = 1_000_000  # more than any size or count of a model


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the text is one sentence that names the file."""


class Config:
    """The values of a JSON object; `null` counts as absent.

    The methods that read a value use the one under any of `names`, which are spellings of one key, else
    `default`. They raise CheckpointError if there is neither, if two spellings have different values, or if
    the value has the wrong type or is out of range.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = {name: value for name, value in values.items() if value is not None}
        self._nulls = values.keys() - self._values.keys()

    @classmethod
    def read(cls, path: Path) -> "Config":
        """Read the JSON object in `path`. Raises CheckpointError."""
        return cls(path, read_json_object(path))

    def with_nulls(self, meanings: Mapping[str, Any]) -> "Config":
        """The same, with what null means for some keys."""
        replaced = {name: meanings[name] for name in self._nulls & meanings.keys()}
        nulls = dict.fromkeys(self._nulls - replaced.keys())
        return Config(self.path, self._values | replaced | nulls)

    def inside(self, *names: str) -> "Config":
        """The object under `names`, one inside the other. Raises CheckpointError if there is none."""
        config = self
        for name in names:
            values = config.optional(name)
            if not isinstance(values, dict):
                raise config.error(f"{name}: expected an object, got {shown(values)}")
            config = Config(self.path, values)
        return config

    def integer(self, *names: str, default: int | None = None, minimum: int = 0, maximum: int = _MAX) -> int:
        name, value = self._get(names, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(f"{name}: expected an integer from {minimum} to {maximum}, got {shown(value)}")
        return value

    def size(self, *names: str, step: int = SCALE_BLOCK) -> int:
        """A positive multiple of `step`."""
        value = self.integer(*names)
        if value == 0 or value % step:
            name, _ = self._get(names, None)
            raise self.error(f"{name}: expected a multiple of {step}, got {value}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        name, value = self._get(names, default)
        if type(value) not in (int, float) or not abs(value) <= _MAX:
            raise self.error(f"{name}: expected a number up to {_MAX}, got {shown(value)}")
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.number(*names, default=default)
        if value <= 0:
            name, _ = self._get(names, default)
            raise self.error(f"{name}: expected a number above 0, got {value:g}")
        return value

    def entry(self, name: str, layer: int) -> float:
        """A layer's number, of at least 0, in a list with one for each layer; 0 if it is null or absent."""
        values = self._values.get(name, [])
        if not isinstance(values, list) or any(
            item is not None and (type(item) not in (int, float) or not 0 <= item <= _MAX) for item in values
        ):
            raise self.error(f"{name}: expected a list of numbers from 0 to {_MAX}, got {shown(values)}")
        if values and layer >= len(values):
            raise self.error(f"{name}: expected an entry for layer {layer}, got {len(values)} entries")
        return float(values[layer] or 0) if values else 0.0

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        name, value = self._get(names, default)
        if not isinstance(value, bool):
            raise self.error(f"{name}: expected true or false, got {shown(value)}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; empty if absent."""
        value = self._values.get(name, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(f"{name}: expected a list of integers, got {shown(value)}")
        return tuple(value)

    def optional(self, name: str) -> Any:
        """The value, of any type, or None."""
        return self._values.get(name)

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """Whether the name of a value that is neither 0, false nor empty matches, in nested objects, too."""
        return _mentions(self._values, pattern)

    def is_null(self, name: str) -> bool:
        """Whether the value is present and null."""
        return name in self._nulls

    def expect(self, name: str, *expected: object) -> None:
        """Raise CheckpointError if `name` is present with a value that is none of `expected`."""
        value = self._single(name) if name in self._values else expected[0]
        if value not in expected:
            raise self.error(f"{name}: expected {' or '.join(map(repr, expected))}, got {shown(value)}")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def _get(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        given = [name for name in names if name in self._values]
        for name in given[1:]:
            if self._single(name) != self._single(given[0]):
                values = f"{shown(self._values[given[0]])} and {shown(self._values[name])}"
                raise self.error(f"{given[0]} and {name}: expected the same value, got {values}")
        if given:
            return given[0], self._single(given[0])
        if default is None:
            raise self.error(f"{any_of(names)}: expected a value, got none")
        return names[0], default

    def _single(self, name: str) -> Any:
        """The value; of a list with an equal entry for each layer, the entry."""
        value = self._values[name]
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return value


def _mentions(values: Mapping[str, Any], pattern: re.Pattern[str]) -> bool:
    return any(
        (value and pattern.search(name)) or (isinstance(value, dict) and _mentions(value, pattern))
        for name, value in values.items()
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        check_readable(path)
        text = read_text(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got invalid JSON: {shown(str(error))}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {shown(values)}")
    return values
