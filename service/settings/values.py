"""Nested values merged from several sources, with the origin of each."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

from expertd.service.util.sentences import shown

_PLAIN = re.compile(r"[\w-]{1,60}")
Key = tuple[str, ...]
"""The path to a value: ("limits", "max_batch_tokens"), or ("models", "0", "name") through a list."""


def dotted(key: Key) -> str:
    """The key with dots between its parts; unusual parts are quoted, long ones are cut."""
    return ".".join(part if _PLAIN.fullmatch(part) else f"{part!a:.60}" for part in _text(key))


class SettingsError(Exception):
    """Invalid settings; the text has a line for each mistake, one sentence for the user."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class DisagreementError(ValueError):
    """Settings that do not fit each other; `mistakes` has a sentence for each."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


def check_agreement(mistakes: Iterable[str]) -> None:
    """Raise DisagreementError if there are any."""
    if found := list(mistakes):
        raise DisagreementError(found)


def matching(pattern: str, expected: str) -> AfterValidator:
    """A check that a whole text matches; else its sentence says `expected`, in words."""
    form = re.compile(pattern)

    def check(text: str) -> str:
        if form.fullmatch(text) is None:
            raise ValueError(f"expected {expected}, got {shown(text)}")
        return text

    return AfterValidator(check)


def check_host(host: str) -> str:
    """Raise ValueError for what is neither an address nor a name that could be looked up."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"expected a name or address, got {shown(host)}") from None
    return host


HostName = Annotated[str, AfterValidator(check_host)]


@dataclass(frozen=True)
class Assignment:
    """A value for `key`; `origin` maps the full key of each of its parts to the part's origin."""

    key: Key
    value: Any
    origin: Callable[[Key], str]


@dataclass
class Values:
    """The merged values: `tree` holds them as nested mappings and lists."""

    tree: dict[str, Any] = field(default_factory=dict)
    _origins: dict[Key, str] = field(default_factory=dict)

    def put(self, assignment: Assignment) -> None:
        """Add a value: mappings are merged with the present ones, anything else replaces the present value.

        A number in the key selects an entry of a list. Raises SettingsError if the list has no such entry.
        """
        key, value, origin = assignment.key, assignment.value, assignment.origin
        container, last = self._place(key, origin)
        below = container.get(last) if isinstance(container, dict) else container[last]
        if isinstance(value, Mapping) and isinstance(below, dict):
            for name, item in value.items():
                self.put(Assignment((*key, name), item, origin))
            return
        self._forget(key)
        container[last] = copy.deepcopy(value)
        for part in _parts(key, value):
            self._origins[part] = origin(part)

    def origins(self, key: Key) -> list[str]:
        """The origin of the value at `key`, or else the origins of its parts; empty for a default."""
        key = _text(key)
        if key in self._origins:
            return [self._origins[key]]
        return [origin for part, origin in self._origins.items() if part[: len(key)] == key]

    def nearest(self, key: Key) -> list[str]:
        """The origins of `key`, or else of the innermost enclosing value that has any."""
        for end in range(len(key), 0, -1):
            if found := self.origins(key[:end]):
                return found
        return []

    def _place(self, key: Key, origin: Callable[[Key], str]) -> tuple[Any, str | int]:
        """The mapping or list that is to hold the value at `key`, and the value's key or index in it."""
        container: Any = self.tree
        for depth, part in enumerate(key[:-1], 1):
            index = _index(container, key[:depth], origin)
            below = container.get(part) if isinstance(container, dict) else container[index]
            if not isinstance(below, (dict, list)):
                self._forget(key[:depth])
                below = container[index] = {}
            container = below
        return container, _index(container, key, origin)

    def _forget(self, key: Key) -> None:
        for part in [part for part in self._origins if part[: len(key)] == _text(key)]:
            del self._origins[part]


def _index(container: Any, key: Key, origin: Callable[[Key], str]) -> str | int:
    """The last part of `key`, converted to an index if `container` is a list."""
    part = key[-1]
    if not isinstance(container, list):
        return part
    if not (part.isdecimal() and int(part) < len(container)):
        raise SettingsError(
            f"{origin(key)}: {dotted(key[:-1])}: expected the index of one of its "
            f"{len(container)} entries, counted from 0, got {part!a:.80}"
        )
    return int(part)


def _parts(key: Key, value: Any) -> Iterator[Key]:
    yield _text(key)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_list(value) else ()
    for name, item in items:
        yield from _parts((*key, str(name)), item)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _text(key: Key) -> Key:
    """`key` as strings: YAML keys can be of other types, which validation refuses later."""
    return tuple(map(str, key))
