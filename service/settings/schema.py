"""What there is at a key of the settings: read off `Settings`, so that nothing has to be listed twice."""

from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from expertd.service.settings.model import Settings
from expertd.service.settings.values import Key


def annotation_at(key: Key) -> Any:
    """The type of the setting, without "or null"; None where there is no such setting."""
    annotation: Any = Settings
    for part in key:
        annotation = _step(annotation, part)
    return annotation


def model_at(key: Key) -> type[BaseModel] | None:
    """The class whose fields are the settings below `key`, if it has such."""
    annotation = annotation_at(key)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_structured(key: Key) -> bool:
    """Whether the setting is a mapping or a list, and so written as YAML where there is only text."""
    return model_at(key) is not None or get_origin(annotation_at(key)) in (dict, tuple)


def is_optional(key: Key) -> bool:
    """Whether the setting may be null."""
    owner = model_at(key[:-1])
    field = owner.model_fields.get(key[-1]) if owner else None
    return field is not None and NoneType in get_args(field.annotation)


def _step(annotation: Any, part: str) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(part)
        return _plain(field.annotation) if field else None
    if get_origin(annotation) is tuple and part.isdecimal():
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return _plain(get_args(annotation)[1])
    return None


def _plain(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        (one,) = [argument for argument in get_args(annotation) if argument is not NoneType]
        return _plain(one)
    return annotation
