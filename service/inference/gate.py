"""Who may call: keys in `Authorization: Bearer KEY`, from a file that is read again when it changes."""

import logging
from collections.abc import Collection
from pathlib import Path
from time import monotonic

from expertd.service.engine.metrics.requests import KeyCounts
from expertd.service.engine.steps import caller_number
from expertd.service.inference.errors import RequestError
from expertd.service.inference.head import InferHead
from expertd.service.inference.versions import check_client
from expertd.service.settings.keys import ApiKey, Keys, Right, load_keys
from expertd.service.settings.values import SettingsError
from expertd.service.tracing.context import Headers
from expertd.service.util.sentences import all_of, any_of

logger = logging.getLogger(__name__)

_CHECK_EVERY_SECONDS = 1.0
_Version = tuple[int, int, int] | None  # of a file; None: there is none
_UNREAD: _Version = (0, 0, 0)
_INFER: tuple[Right, ...] = ("infer",)
KEY_NAME, KEY_ADMIN = b"expertd-key-name", b"expertd-key-admin"
"""The headers with which an HTTP process tells the engine's process whose key a call has, and that it has
the right admin.
"""


class KeyFile:
    """The keys of a file; while the file is missing or invalid, those that it had before.

    keys  to begin with, of another process; None: those of the file, which then raises SettingsError
    """

    def __init__(self, path: Path, keys: Keys | None = None) -> None:
        self._path = path
        self._version = _version(path) if keys is None else _UNREAD
        self._keys = load_keys(path) if keys is None else keys
        self._is_wrong = False  # what is in the file
        self._check_at = monotonic() + (_CHECK_EVERY_SECONDS if keys is None else 0)

    def current(self) -> Keys:
        """The keys as of the last second."""
        if monotonic() >= self._check_at:
            self._check()
        return self._keys

    def _check(self) -> None:
        self._check_at = monotonic() + _CHECK_EVERY_SECONDS
        version = _version(self._path)  # before it is read: a change meanwhile is another version
        if version == self._version:
            return
        self._version = version
        try:
            keys = load_keys(self._path)
        except SettingsError as error:
            mistake, others = error.mistakes[0], len(error.mistakes) - 1
            more = f" (and {others} more)" if others else ""
            logger.error("%s%s; the keys that were read before remain in use", mistake, more)
            self._is_wrong = True
            return
        if keys.keys != self._keys.keys:
            self._keys = keys
            names = all_of([key.name for key in keys.keys]) or "none"
            logger.info("keys: %s has changed, and has %s", self._path, names)
        elif self._is_wrong:
            logger.info("keys: %s can be read again, and has not changed", self._path)
        self._is_wrong = False


class Gate:
    """Checks the key of every call; without a file of keys, everybody may call everything.

    behind  calls come from HTTP processes, which have checked the keys and pass on their names
    """

    def __init__(self, file: KeyFile | None, counts: KeyCounts, behind: bool = False) -> None:
        self._behind = behind
        self._file = file
        self._counts = counts
        self._keys: Keys | None = None
        self.refresh()

    def refresh(self) -> Keys | None:
        """Read the file again if it has changed, at most once a second; its keys, or None without a file."""
        if self._file is not None and (keys := self._file.current()) is not self._keys:
            self._keys = keys
            for key in keys.keys:
                self._counts.add(key.name)
        return self._keys

    def admit_infer(self, head: InferHead) -> None:
        """Check an infer request, before its body is read. Raises RequestError."""
        if (keys := self.refresh()) is None:
            if self._behind:
                head.key_name = self.caller(head.headers)
                head.caller = caller_number(head.key_name)
            return
        if head.keys is keys:  # a head like this one was admitted, and no key has changed since
            self._counts.admitted(head.key_name)
            return
        head.key_name = self._check(keys, head.headers, _INFER)
        head.caller = caller_number(head.key_name)
        head.keys = keys

    def admit(self, rights: Collection[Right], headers: Headers) -> None:
        """Check a call that needs one of these rights, before its body is read. Raises RequestError."""
        keys = self.refresh()
        if keys is not None and rights:
            self._check(keys, headers, rights)
        check_client(headers)

    def knows(self, headers: Headers) -> bool:
        """Whether a call has a known key."""
        return self._known(headers) is not None

    def name_of(self, headers: Headers) -> str:
        """The name of a call's key, for the log; "-" without one."""
        return self.caller(headers) or "-"

    def caller(self, headers: Headers) -> str:
        """The name of an admitted call's key, also of one that was passed on; "" without one."""
        told = headers if self._behind else self.told(headers)
        return next((value.decode("latin-1") for name, value in told if name == KEY_NAME), "")

    def told(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Headers that tell the engine's process which key a call was admitted with; none without a key."""
        key = self._known(headers)
        if key is None:
            return []
        admin = [(KEY_ADMIN, b"true")] if "admin" in key.rights else []
        return [(KEY_NAME, key.name.encode("ascii")), *admin]

    def check_own(self, what: str, owner: str, headers: Headers) -> None:
        """Raise RequestError unless an admitted call has the key `owner`, or one with the right admin."""
        told = headers if self._behind else self.told(headers)
        if (caller := self.caller(headers)) != owner and not any(name == KEY_ADMIN for name, _ in told):
            expected = "the key that opened it, or one with the right admin"
            raise RequestError(f"{what}: expected {expected}, got key {caller}", reason="forbidden")

    def _known(self, headers: Headers) -> ApiKey | None:
        keys = self.refresh()
        try:
            return None if keys is None else keys.find(_secret(headers))
        except RequestError:
            return None

    def _check(self, keys: Keys, headers: Headers, rights: Collection[Right]) -> str:
        """The name of the key. Raises RequestError."""
        try:
            key = keys.find(_secret(headers))
            if key is None:
                raise _unauthorized("Authorization: expected a key of this server, got an unknown one")
        except RequestError:
            self._counts.unauthorized()
            raise
        if not any(right in key.rights for right in rights):
            self._counts.forbidden(key.name)
            raise _forbidden(key, rights)
        self._counts.admitted(key.name)
        return key.name


def _version(path: Path) -> _Version:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _secret(headers: Headers) -> bytes:
    """The key in the headers, whose names are in lower case. Raises RequestError; never shows a value."""
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) > 1:
        raise _unauthorized(f"Authorization: expected one header, got {len(given)}")
    if not given:
        raise _unauthorized("Authorization: expected Bearer and a key, got none")
    scheme, _, secret = given[0].partition(b" ")
    if scheme.lower() != b"bearer" or not secret.strip():
        raise _unauthorized("Authorization: expected Bearer and a key, got something else")
    return secret.strip()


def _unauthorized(text: str) -> RequestError:
    return RequestError(text, reason="unauthorized")


def _forbidden(key: ApiKey, rights: Collection[Right]) -> RequestError:
    text = f"key {key.name}: expected the right {any_of(rights)}, got {all_of(key.rights)}"
    return RequestError(text, reason="forbidden")
