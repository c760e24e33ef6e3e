"""Nested values merged from several sources, with the origin of each, and the sentences about wrong ones."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from expertd.service.util.sentences import shown

_PLAIN = re.compile(r"[\w-]{1,60}")
Key = tuple[str, ...]
"""The path to a value: ("limits", "max_batch_tokens"), or ("models", "0", "name") through a list."""


def dotted(key: Key) -> str:
    """The key with dots between its parts; unusual parts are quoted, long ones are cut."""
    return ".".join(part if _PLAIN.fullmatch(part) else f"{part!a:.60}" for part in map(str, key))


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

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base ** (power + 1)
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
_SIZE = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,6}})?) *({'|'.join(_UNITS)})", re.IGNORECASE)


def _to_bytes(value: object) -> object:
    """10737418240 for "10GiB"."""
    if not isinstance(value, str):
        return value
    if (found := _SIZE.fullmatch(value)) is None:
        raise ValueError(f"expected bytes, or a number with a unit like 10GiB, got {shown(value)}")
    units = {name.upper(): factor for name, factor in _UNITS.items()}
    return int(float(found[1]) * units[found[2].upper()])


NumBytes = Annotated[int, BeforeValidator(_to_bytes), Field(ge=1), WithJsonSchema({"type": "string"})]
"""A number of bytes, in settings also with a unit."""


class Value(NamedTuple):
    """A value from a source, with its origin; a mapping or list holds more of them.

    origin  None for a mapping that is there only for the values in it
    """

    content: Any
    origin: str | None

    @classmethod
    def of(cls, content: Any, origin: Callable[[Key], str], key: Key = ()) -> Self:
        """`content` and all that it holds; `origin` gives that of what is at a key, below `key`."""
        held = content
        if isinstance(content, dict):
            held = {name: cls.of(item, origin, (*key, str(name))) for name, item in content.items()}
        elif isinstance(content, list):
            held = [cls.of(item, origin, (*key, str(index))) for index, item in enumerate(content)]
        return cls(held, origin(key))

    @property
    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.content, dict):
            return {name: item.plain for name, item in self.content.items()}
        return [item.plain for item in self.content] if isinstance(self.content, list) else self.content

    def merged(self, other: Self) -> Self:
        """This value overridden by another: mappings are merged, anything else is replaced."""
        if not (isinstance(self.content, dict) and isinstance(other.content, dict)):
            return other
        mine = self.content
        new = {
            name: mine[name].merged(item) if name in mine else item for name, item in other.content.items()
        }
        return self._replace(content=mine | new)

    def put(self, key: Key, other: Self, above: Key = ()) -> Self:
        """This value with that at `key` overridden, where a number is the index of a list's entry.

        above  the key of this value. Raises SettingsError if a list has no such entry.
        """
        if not key:
            return self.merged(other)
        name, held = key[0], self.content
        if isinstance(held, list):
            if not (name.isdecimal() and int(name) < len(held)):
                raise SettingsError(
                    f"{other.origin}: {dotted(above)}: expected the index of one of its "
                    f"{len(held)} entries, counted from 0, got {name!a:.80}"
                )
            new = held[int(name)].put(key[1:], other, (*above, name))
            return self._replace(content=[*held[: int(name)], new, *held[int(name) + 1 :]])
        below = held if isinstance(held, dict) else {}
        new = below.get(name, type(self)({}, None)).put(key[1:], other, (*above, name))
        return type(self)(below | {name: new}, self.origin if below is held else None)

    def origins(self, key: Key = ()) -> list[str]:
        """The origin of the value at `key`, or else the origins of its parts; empty for a default."""
        held = dict(enumerate(self.content)) if isinstance(self.content, list) else self.content
        # Parts of keys are texts; names in YAML may be others, which are refused later.
        items = {str(name): item for name, item in held.items()} if isinstance(held, dict) else {}
        if key:
            return items[key[0]].origins(key[1:]) if key[0] in items else []
        if self.origin is not None:
            return [self.origin]
        return [origin for item in items.values() for origin in item.origins()]

    def nearest(self, key: Key) -> list[str]:
        """The origins of `key`, or else of the innermost enclosing value that has any."""
        found = (self.origins(key[:end]) for end in range(len(key), 0, -1))
        return next(filter(None, found), [])
