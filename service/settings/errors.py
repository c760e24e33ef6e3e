"""Turns a validation error into one sentence that begins with the origin of the invalid value."""

import re
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from expertd.service.sentences import expected_and_got
from expertd.service.settings.schema import is_setting, model_at
from expertd.service.settings.values import Key, Values, dotted

_NAMED = re.compile(r"([a-z_]\w*(?:\.\w+)*): (.*)", re.DOTALL)
_WORD = re.compile(r"[a-z_]\w*(?:\.\w+)*")
_MOST_ORIGINS = 3


def sentence(error: ValidationError, values: Values, otherwise: str) -> str:
    """`origin: name: expected this, got that` for the first error.

    The origins are those of the values the error concerns, or `otherwise` if all of them are defaults.
    """
    details = error.errors(include_url=False)
    # A misspelled key often explains why another one is missing.
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    key = tuple(str(part) for part in first["loc"])
    name, text = _name_and_text(first, key)
    origins = [origin for about in _about(first, key) for origin in values.origins(about)]
    origins = origins or values.nearest(key) or [otherwise]
    return f"{', '.join(list(dict.fromkeys(origins))[:_MOST_ORIGINS])}: {f'{name}: ' if name else ''}{text}"


def _name_and_text(error: ErrorDetails, key: Key) -> tuple[str, str]:
    name = dotted(key)
    if error["type"] == "extra_forbidden":
        owner = model_at(key[:-1])
        known = ", ".join(owner.model_fields) if owner else ""
        return name, f"expected one of {known}, got an unknown setting"
    text = expected_and_got(error)
    if error["type"] == "value_error" and (named := _NAMED.fullmatch(text)):
        within = (*key, *named[1].split("."))  # a check of several values names the invalid one
        if is_setting(within):
            return dotted(within), named[2]
    return name, text


def _about(error: ErrorDetails, key: Key) -> Iterator[Key]:
    """The keys an error concerns: its own, or all settings that a check of several values names."""
    model = model_at(key)
    if error["type"] != "value_error" or model is None:
        yield key
        return
    expected = expected_and_got(error).partition(", got ")[0]
    for word in _WORD.findall(expected):
        yield from _named(key, model, tuple(word.split(".")))


def _named(key: Key, model: type[BaseModel], word: Key) -> Iterator[Key]:
    if is_setting((*key, *word)):
        yield (*key, *word)
    for name in model.model_fields:
        if (within := model_at((*key, name))) is not None:
            yield from _named((*key, name), within, word)
