"""Where a server is, `http://host:port` or `unix:/path`, and the API key that it is sent."""

import ipaddress
import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from expertd_client.errors import InvalidRequestError

_DEFAULT_PORT = 80
_KEY = re.compile("[!-~]*")


@dataclass(frozen=True)
class Address:
    """A server's address. `path` is its Unix socket (None: TCP), `base` the start of every URL's path.

    `key` is sent with every request, and never shown; empty: none.
    """

    url: str
    host: str = "localhost"
    port: int = _DEFAULT_PORT
    path: str | None = None
    base: str = ""
    key: str = field(default="", repr=False)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.path is not None or self.port == _DEFAULT_PORT else f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine, as far as its address says."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(url: str, key: str | None = None) -> Address:
    """`key` None: that of the environment, EXPERTD_KEY.

    Raises InvalidRequestError for anything but http://host[:port][/base] and unix:/path, and for a key that
    cannot be sent.
    """
    key = os.environ.get("EXPERTD_KEY", "") if key is None else key
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InvalidRequestError("key: expected printable ASCII without spaces, got something else")
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        path = path.removeprefix("//")
        if not path.startswith("/"):
            raise _invalid(url)
        return Address(url, path=path, key=key)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _invalid(url) from None
    if parts.scheme != "http" or not host or parts.username or parts.query or parts.fragment:
        raise _invalid(url)
    if not url.isascii() or any(character.isspace() or character < " " for character in url):
        raise _invalid(url)
    return Address(url, host, _DEFAULT_PORT if port is None else port, base=parts.path.rstrip("/"), key=key)


def _invalid(url: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: expected http://host:port or unix:/path, got {url!r}")
