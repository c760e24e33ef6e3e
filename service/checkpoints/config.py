"""config.json, with a sentence for everything in it that cannot be used."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST = 1_000_000  # more than any size or count of a model


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the text is one sentence that names the file."""


class Config:
    """The values of a JSON object; `null` counts as not there.

    The readers take the first of `names` that is there, else `default`, and raise CheckpointError when there
    is neither, or when the value is of another kind.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def read(cls, path: Path) -> "Config":
        """Raise CheckpointError unless `path` can be read and holds a JSON object."""
        return cls(path, read_json_object(path))

    def integer(self, *names: str, default: int | None = None) -> int:
        name, value = self._get(names, default)
        if type(value) is not int or not 0 <= value <= _MOST:
            raise self.error(f"{name}: expected a whole number from 0 to {_MOST}, got {value!r:.80}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        name, value = self._get(names, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{name}: expected a number, got {value!r}")
        return float(value)

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        name, value = self._get(names, default)
        if not isinstance(value, bool):
            raise self.error(f"{name}: expected true or false, got {value!r}")
        return value

    def integers(self, *names: str) -> tuple[int, ...]:
        """A list of whole numbers, empty when there is none."""
        name, value = self._get(names, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(f"{name}: expected a list of whole numbers, got {value!r}")
        return tuple(value)

    def optional(self, name: str) -> Any:
        """The value, of whatever kind, or None."""
        return self._values.get(name)

    def expect(self, name: str, expected: str) -> None:
        """Raise CheckpointError when `name` is there and says something else: code that is not written."""
        value = self._values.get(name, expected)
        if value != expected:
            raise self.error(f"{name}: expected {expected!r}, got {value!r}")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def _get(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        for name in names:
            if name in self._values:
                return name, self._values[name]
        if default is None:
            raise self.error(f"{' or '.join(names)}: a value is required, got none")
        return names[0], default


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
