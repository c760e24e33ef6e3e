"""Which servers a pool has: a list of URLs, a name with several addresses, or a file."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from expertd_client.address import URL
from expertd_client.errors import InvalidRequestError

_DNS = re.compile(r"dns:(?P<host>[^:/?#\[\]\s]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})")


class UrlSource(Protocol):
    """Knows the URLs of a pool's servers, which may change."""

    def urls(self) -> list[str]:
        """Those of now, each once. May take a while. Raises OSError, ValueError if they cannot be known."""


class Fixed:
    """Always the same."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(dict.fromkeys(urls))
        if not self._urls:
            raise InvalidRequestError(f"url: expected {URL}, or several, got none")

    def urls(self) -> list[str]:
        """See `UrlSource`."""
        return self._urls


class Resolved:
    """All addresses of a name, as of a headless service."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host.strip("[]"), port

    def urls(self) -> list[str]:
        """See `UrlSource`."""
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(place[0]) for *_, place in found)
        return [f"http://{_in_url(address)}:{self._port}" for address in addresses]


class Listed:
    """In a file, a URL in each line; empty lines, and those that begin with #, do not count."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def urls(self) -> list[str]:
        """See `UrlSource`."""
        lines = (line.strip() for line in self._path.read_text().splitlines())
        urls = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
        if not urls:
            raise ValueError(f"{self._path}: expected a URL in each line, got none")
        return urls


def source_of(given: str | Sequence[str]) -> UrlSource | None:
    """What a client's `url` names; None: a single server. Raises InvalidRequestError."""
    if not isinstance(given, str):
        if not isinstance(given, Sequence) or not all(isinstance(url, str) for url in given):
            raise InvalidRequestError(f"url: expected {URL}, got {given!r:.200}")
        return Fixed(given)
    if given.startswith("file:"):
        path = Path(given.removeprefix("file:"))
        if not path.is_absolute():
            raise InvalidRequestError(f"url: expected file: with a path from /, got {given!r:.200}")
        return Listed(path)
    if given.startswith("dns:"):
        match = _DNS.fullmatch(given)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise InvalidRequestError(f"url: expected dns:NAME:PORT, got {given!r:.200}")
        return Resolved(match["host"], int(match["port"]))
    return None


def _in_url(address: str) -> str:
    """An IP address as URLs have it."""
    plain = address.partition("%")[0]
    return f"[{address}]" if isinstance(ipaddress.ip_address(plain), ipaddress.IPv6Address) else address
