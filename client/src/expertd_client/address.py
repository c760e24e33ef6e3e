"""Where a server is: `http://host:port` or `unix:/path`."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from expertd_client.errors import InvalidRequestError

_DEFAULT_PORT = 80


@dataclass(frozen=True)
class Address:
    """A server's address. `path` is its Unix socket (None: TCP), `base` the start of every URL's path."""

    url: str
    host: str = "localhost"
    port: int = _DEFAULT_PORT
    path: str | None = None
    base: str = ""

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


def parse_address(url: str) -> Address:
    """Raises InvalidRequestError for anything but http://host[:port][/base] and unix:/path."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        path = path.removeprefix("//")
        if not path.startswith("/"):
            raise _invalid(url)
        return Address(url, path=path)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _invalid(url) from None
    if parts.scheme != "http" or not host or parts.username or parts.query or parts.fragment:
        raise _invalid(url)
    if not url.isascii() or any(character.isspace() or character < " " for character in url):
        raise _invalid(url)
    return Address(url, host, _DEFAULT_PORT if port is None else port, base=parts.path.rstrip("/"))


def _invalid(url: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: expected http://host:port or unix:/path, got {url!r}")
