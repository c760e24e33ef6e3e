"""Looks up settings by key in the fields of `Settings`."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from expertd.service.settings.model import Settings
from expertd.service.settings.values import Key
from expertd.service.settings.variables import VariableSource


def is_setting(key: Key) -> bool:
    """Whether there is a setting, or a group of settings, at `key`."""
    return _field_at(key) is not None


def all_keys(start: Key = ()) -> Iterator[Key]:
    """The keys of all settings, and groups of them, below `start`; entries of lists have the number 0."""
    owner = model_at(start)
    for name in owner.model_fields if owner else ():
        key = (*start, name)
        yield key
        yield from all_keys(key)
        yield from all_keys((*key, "0"))


def model_at(key: Key) -> type[BaseModel] | None:
    """The class whose fields are the settings below `key`; None if there are none."""
    field = _field_at(key)
    annotation = getattr(field, "annotation", field)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def default_at(key: Key) -> Any:
    """The default of the setting at `key`, as in JSON; None if it has none."""
    default = getattr(_field_at(key), "default", None)
    return None if default is PydanticUndefined else to_jsonable_python(default)


def _field_at(key: Key) -> Any:
    field: Any = Settings
    for part in key:
        field = _source().next_field(field, part)
    return field


@cache
def _source() -> VariableSource:
    return VariableSource(Settings, env_prefix="")
