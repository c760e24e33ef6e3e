"""Looks up settings by key in the fields of `Settings`."""

from functools import cache
from typing import Any

from pydantic import BaseModel

from expertd.service.settings.model import Settings
from expertd.service.settings.values import Key
from expertd.service.settings.variables import VariableSource


def is_setting(key: Key) -> bool:
    """Whether there is a setting, or a group of settings, at `key`."""
    return _field_at(key) is not None


def model_at(key: Key) -> type[BaseModel] | None:
    """The class whose fields are the settings below `key`; None if there are none."""
    field = _field_at(key)
    annotation = getattr(field, "annotation", field)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _field_at(key: Key) -> Any:
    field: Any = Settings
    for part in key:
        field = _source().next_field(field, part)
    return field


@cache
def _source() -> VariableSource:
    return VariableSource(Settings, env_prefix="")
