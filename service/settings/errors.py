"""Turns a validation error into sentences, each of which begins with the origin of an invalid value."""

import re
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from expertd.service.settings.schema import all_keys, is_setting, model_at
from expertd.service.settings.sources import NOT_SETTINGS, VARIABLE, variable_name
from expertd.service.settings.values import DisagreementError, Key, Value, dotted
from expertd.service.util.sentences import did_you_mean, expected_and_got, like

_NAMED = re.compile(r"([a-z_]\w*(?:\.\w+)*): (.*)", re.DOTALL)
_WORD = re.compile(r"[a-z_]\w*(?:\.\w+)*")
_MAX_ORIGINS = 3
_MAX_SENTENCES = 20


def sentences(error: ValidationError, values: Value, otherwise: str) -> list[str]:
    """`origin: name: expected this, got that` for each mistake; after the first few, their number.

    The origins are those of the values the mistake concerns, or `otherwise` if all of them are defaults.
    """
    details = error.errors(include_url=False)
    # A misspelled key often explains why another one is missing.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    found = [_sentence(detail, text, values, otherwise) for detail in details for text in _texts(detail)]
    found = list(dict.fromkeys(found))
    if (more := len(found) - _MAX_SENTENCES) > 0:
        found[_MAX_SENTENCES:] = [f"{otherwise}: expected valid settings, got {more} more that are not"]
    return found


def _sentence(error: ErrorDetails, text: str, values: Value, otherwise: str) -> str:
    key = tuple(str(part) for part in error["loc"])
    name, shown = _name_and_text(error, key, text)
    if error["type"] == "extra_forbidden":
        shown += _meant(key, values)
    origins = [origin for about in _about(error, key, text) for origin in values.origins(about)]
    origins = origins or values.nearest(key) or [otherwise]
    return f"{', '.join(list(dict.fromkeys(origins))[:_MAX_ORIGINS])}: {f'{name}: ' if name else ''}{shown}"


def _texts(error: ErrorDetails) -> Sequence[str]:
    """The texts of an error: several if settings disagree in several ways."""
    cause = error.get("ctx", {}).get("error")
    return cause.mistakes if isinstance(cause, DisagreementError) else [expected_and_got(error)]


def _name_and_text(error: ErrorDetails, key: Key, text: str) -> tuple[str, str]:
    name = dotted(key)
    if error["type"] == "extra_forbidden":
        owner = model_at(key[:-1])
        known = ", ".join(owner.model_fields) if owner else ""
        return name, f"expected one of {known}, got an unknown setting"
    if error["type"] == "value_error" and (named := _NAMED.fullmatch(text)):
        within = (*key, *named[1].split("."))  # a check of several values names the invalid one
        if is_setting(within):
            return dotted(within), named[2]
    return name, text


def _meant(key: Key, values: Value) -> str:
    """A hint at the setting that a misspelt one was meant to be, or at those of its name in other groups."""
    is_variable = any(origin.startswith(VARIABLE) for origin in values.origins(key))
    numbers = dict(enumerate(key))
    keys = [
        tuple(numbers.get(depth, part) if part.isdecimal() else part for depth, part in enumerate(each))
        for each in all_keys()
    ]
    names = [".".join(each) for each in keys] + list(NOT_SETTINGS if is_variable else ())
    meant = like(".".join(key), names) or [".".join(each) for each in keys if each[-1] == key[-1]]
    return did_you_mean([variable_name(name) for name in meant] if is_variable else meant)


def _about(error: ErrorDetails, key: Key, text: str) -> Iterator[Key]:
    """The keys an error concerns: its own, or all settings that a check of several values names."""
    model = model_at(key)
    if error["type"] != "value_error" or model is None:
        yield key
        return
    for word in _WORD.findall(text.partition(", got ")[0]):
        yield from _named(key, model, tuple(word.split(".")))


def _named(key: Key, model: type[BaseModel], word: Key) -> Iterator[Key]:
    if is_setting((*key, *word)):
        yield (*key, *word)
    for name in model.model_fields:
        if (within := model_at((*key, name))) is not None:
            yield from _named((*key, name), within, word)
