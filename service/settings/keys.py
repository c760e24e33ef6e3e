"""API keys as a file holds them: a name, the SHA-256 of the key, and its rights. No error shows a value.

A key has 256 random bits, so nobody finds it from a plain hash: salt and stretching are for passwords.
"""

import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from expertd.service.settings.values import SettingsError
from expertd.service.settings.yaml_text import TooManyValuesError, YamlTextError, parse
from expertd.service.util.files import read_text
from expertd.service.util.sentences import all_of, shown

Right = Literal["infer", "admin", "metrics"]
RIGHTS: tuple[Right, ...] = get_args(Right)
MAX_KEYS = 256

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME = "1 to 64 letters, digits, '.', '_' or '-'"
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("name", "sha256", "rights")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key."""

    name: str
    sha256: str  # hexadecimal
    rights: tuple[Right, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The keys of one version of a file."""

    keys: tuple[ApiKey, ...]

    def find(self, secret: bytes) -> ApiKey | None:
        """The key that is `secret`, in a time that does not depend on how much of it is right."""
        digest, found = sha256(secret).hexdigest(), None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def load_keys(path: Path) -> Keys:
    """Read a file of keys. Raises SettingsError with a sentence for each mistake."""
    if path.exists() and not path.is_file():  # a pipe would keep the event loop, and be empty the next time
        raise SettingsError(f"keys: {path}: expected a regular file, got another kind")
    try:
        value = parse(read_text(path), fast=True).value  # on the event loop, under traffic
    except YamlTextError as error:
        place = str(path) if error.line is None else f"{path}:{error.line}"
        text = error if isinstance(error, TooManyValuesError) else "expected YAML, got something else"
        raise SettingsError(f"keys: {place}: {text}") from error
    except ValueError as error:
        raise SettingsError(f"keys: {error}") from error
    if not isinstance(value, list):
        raise SettingsError(f"keys: {path}: expected a list of keys, got {_kind(value)}")
    if len(value) > MAX_KEYS:
        raise SettingsError(f"keys: {path}: expected at most {MAX_KEYS} keys, got {len(value)}")
    mistakes = [
        f"keys: {path}: {number}{mistake}"
        for number, entry in enumerate(value)
        for mistake in wrong_entry(entry)
    ]
    if not mistakes:
        mistakes = [f"keys: {path}: {mistake}" for mistake in _repeated(value)]
    if mistakes:
        raise SettingsError(*mistakes)
    return Keys(tuple(_key(entry) for entry in value))


def wrong_entry(entry: Any, shows_rights: bool = False) -> Iterator[str]:
    """The mistakes in an entry, each with the field that it is in.

    shows_rights  whether rights are no secrets, as in arguments: in a file, one may be a key
    """
    if not isinstance(entry, dict):
        yield f": expected name, sha256 and rights, got {_kind(entry)}"
        return
    if unknown := len(entry.keys() - set(_FIELDS)):
        yield f": expected only name, sha256 and rights, got {unknown} more"
    name, digest, rights = (entry.get(field) for field in _FIELDS)
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        yield f".name: expected {_NAME}, got {_kind(name)}"
    if not (isinstance(digest, str) and _HASH.fullmatch(digest)):
        yield f".sha256: expected 64 hexadecimal digits in lower case, got {_kind(digest)}"
    if not isinstance(rights, list) or not rights:
        yield f".rights: expected a list of {all_of(RIGHTS)}, or some of them, got {_kind(rights)}"
    elif others := [right for right in rights if right not in RIGHTS]:
        got = all_of([shown(right) for right in others]) if shows_rights else f"{len(others)} of another name"
        yield f".rights: expected {all_of(RIGHTS)}, or some of them, got {got}"
    elif len(set(rights)) < len(rights):
        yield ".rights: expected each right once, got one twice"


def _repeated(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Mistakes of entries that are valid by themselves."""
    for field in ("name", "sha256"):
        seen: dict[str, int] = {}
        for number, entry in enumerate(entries):
            if (first := seen.setdefault(entry[field], number)) != number:
                yield f"{number}.{field}: expected another one than that of key {first}, got the same"


def _key(entry: dict[str, Any]) -> ApiKey:
    return ApiKey(entry["name"], entry["sha256"], tuple(entry["rights"]))


def _kind(value: object) -> str:
    """What a value is, without the value: it may be a key."""
    if value is None or value == [] or value == "":
        return "none"
    kinds: tuple[tuple[type, str], ...] = ((str, "another text"), (list, "a list"), (dict, "an object"))
    return next((text for kind, text in kinds if isinstance(value, kind)), "another value")
