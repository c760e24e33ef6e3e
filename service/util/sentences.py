"""Formats values and validation errors for messages of the form `name: expected this, got that`."""

import re
import sys
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice

from pydantic_core import ErrorDetails

_MAX_LISTED = 8  # names in a sentence
_ALIKE = 0.75  # of 1, by difflib: how like a name one has to be
_SHOULD_BE = re.compile(r"^Input should (be )?")
# Others keep their Python names.
_KINDS = {"model_type": "an object", "dict_type": "an object", "tuple_type": "a list"}


def shown(value: object, limit: int = 80) -> str:
    """`value` formatted for a sentence: short, on one line, in ASCII."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        if len(value) > 8 or any(isinstance(item, (dict, list)) for item in value):
            return f"an array of {len(value)}"
        return f"[{', '.join(shown(item, limit // 8) for item in value)}]"
    if isinstance(value, int) and abs(value) >= 10**limit:
        return f"an integer of more than {limit} digits"
    text = ascii(value[: limit + 1]) if isinstance(value, str) else ascii(value)
    return shortened(text, limit)


def expected_and_got(error: ErrorDetails) -> str:
    """The text of a validation error, without the name of the value."""
    if error["type"] == "missing":
        return "expected a value, got none"
    if error["type"] == "extra_forbidden":
        return f"expected no such key, got {shown(error['input'])}"
    if error["type"] == "json_invalid":
        return f"expected JSON, got invalid JSON: {error['ctx']['error']}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] in _KINDS:
        return f"expected {_KINDS[error['type']]}, got {shown(error['input'])}"
    if error["type"] == "too_short":
        minimum, got = error["ctx"]["min_length"], error["ctx"]["actual_length"]
        return f"expected at least {minimum} {'entry' if minimum == 1 else 'entries'}, got {got or 'none'}"
    if error["type"] == "too_long":
        maximum = error["ctx"]["max_length"]
        got = (
            error["ctx"]["actual_length"] or f"at least {maximum + 1}"
        )  # of a mapping that is not read to its end
        return f"expected at most {maximum} entries, got {got}"
    if error["type"] == "string_too_short":
        minimum = error["ctx"]["min_length"]
        return f"expected at least {minimum} character{'s' * (minimum > 1)}, got {shown(error['input'])}"
    if error["type"] == "string_too_long":
        return f"expected at most {error['ctx']['max_length']} characters, got {shown(error['input'])}"
    message, replaced = _SHOULD_BE.subn("expected ", error["msg"])
    if not replaced:
        message = f"{message[0].lower()}{message[1:]}"
    message = message.partition(", unable to parse")[0]
    message = re.sub(r"^expected (greater|less)", r"expected a number \1", message)
    return f"{message}, got {shown(error['input'])}"


def like(got: str, names: Iterable[str]) -> list[str]:
    """The name that is most like a misspelt one; empty if none is."""
    return get_close_matches(got, names, 1, _ALIKE)


def did_you_mean(names: Collection[str]) -> str:
    """The end of a sentence about an unknown name, "; did you mean X?"; nothing without any."""
    return f"; did you mean {any_of(names)}?" if names else ""


def long_integer() -> str:
    """The text for JSON with an integer that has more digits than Python converts."""
    return f"expected integers of at most {sys.get_int_max_str_digits()} digits in JSON, got a longer one"


def shortened(text: str, limit: int = 80) -> str:
    """`text`, cut to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def any_of(names: Collection[str]) -> str:
    """The alternatives in `names`, as in "a, b or c"; after the first few, only the number of others."""
    return _listed(names, "or")


def all_of(names: Collection[str]) -> str:
    """All `names`, as in "a, b and c"; after the first few, only the number of others."""
    return _listed(names, "and")


def _listed(names: Collection[str], last: str) -> str:
    parts = [shortened(name) for name in islice(names, _MAX_LISTED)]
    if len(names) > _MAX_LISTED:
        parts.append(f"{len(names) - _MAX_LISTED} more")
    return f" {last} ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
