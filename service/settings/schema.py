"""Looks up settings by key in the fields of `Settings`, and reads their values in variables and flags."""

from collections.abc import Iterator
from functools import cache, lru_cache, reduce
from operator import getitem
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from pydantic_settings import EnvSettingsSource
from pydantic_settings.sources.utils import parse_env_vars

from expertd.service.settings.model import Settings
from expertd.service.settings.values import Key
from expertd.service.settings.yaml_text import parse

_DELIMITER = "\0"  # between the parts of a key, which may have any other characters


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


def read(key: Key, text: str) -> Any:
    """The value in a variable or flag: lists and mappings are YAML, "null" is None, other texts stay texts.

    Raises YamlTextError.
    """
    source = _source()
    variable = {_DELIMITER.join(key): text}
    source.env_vars = parse_env_vars(variable, case_sensitive=True, parse_none_str=source.env_parse_none_str)
    tree = source()
    return reduce(getitem, key, tree) if tree else text  # empty: unknown, or null; both are refused later


@lru_cache(maxsize=4096)  # a mistake is compared with every key
def _field_at(key: Key) -> Any:
    return _source().next_field(_field_at(key[:-1]), key[-1]) if key else Settings


class _Source(EnvSettingsSource):
    """pydantic-settings' own for the environment, with YAML and indices of lists."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: str) -> Any:
        """Parse a list or mapping as YAML, a superset of JSON except for tabs."""
        return parse(value.replace("\t", " ")).value

    def next_field(
        self, field: FieldInfo | Any | None, key: str, case_sensitive: bool | None = None
    ) -> FieldInfo | None:
        """The field or type at `key` below `field`; in a list, a number selects the type of its entries."""
        annotation = field.annotation if isinstance(field, FieldInfo) else field
        if get_origin(annotation) is tuple:
            entry: FieldInfo | None = get_args(annotation)[0] if key.isdecimal() else None
            return entry  # really a type, as the base class returns for values of a mapping
        return super().next_field(field, key, case_sensitive)


@cache
def _source() -> _Source:
    return _Source(Settings, env_prefix="", env_nested_delimiter=_DELIMITER)
