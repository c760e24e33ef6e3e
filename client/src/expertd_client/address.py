"""Where a server is, `http://host:port`, `https://host:port` or `unix:/path`, and what it is shown."""

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from expertd_client.errors import InvalidRequestError
from expertd_client.tls import Certificate, File, make_context

URL = "http://host:port, https://host:port or unix:/path"
_DEFAULT_PORT = 80
_DEFAULT_PORTS = {"http": _DEFAULT_PORT, "https": 443}
_KEY = re.compile("[!-~]*")


@dataclass(frozen=True)
class Address:
    """A server's address. `path` is its Unix socket (None: TCP), `base` the start of every URL's path.

    `key` is sent with every request, and never shown; empty: none. `tls` is for https; None: http.
    """

    url: str
    host: str = "localhost"
    port: int = _DEFAULT_PORT
    path: str | None = None
    base: str = ""
    key: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = _DEFAULT_PORTS["http" if self.tls is None else "https"]
        return host if self.path is not None or self.port == default else f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine, as far as its address says."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(
    url: str, key: str | None = None, ca: File | None = None, certificate: Certificate | None = None
) -> Address:
    """`key` None: that of the environment, EXPERTD_KEY. `ca` and `certificate`: as for `make_context`.

    Raises InvalidRequestError for anything but http[s]://host[:port][/base] and unix:/path, for a key that
    cannot be sent, and for files that cannot be used, or not with this URL.
    """
    key = os.environ.get("EXPERTD_KEY", "") if key is None else key
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InvalidRequestError("key: expected printable ASCII without spaces, got something else")
    if not isinstance(url, str):
        raise _invalid(url)
    if not url.startswith("https:") and (ca is not None or certificate is not None):
        raise InvalidRequestError(f"url: expected https://host:port with ca or certificate, got {url!r}")
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
    if not _is_name(host):
        raise _invalid(url)
    if parts.scheme not in _DEFAULT_PORTS or not host or parts.username or parts.query or parts.fragment:
        raise _invalid(url)
    if not url.isascii() or any(character.isspace() or character < " " for character in url):
        raise _invalid(url)
    tls = make_context(ca, certificate) if parts.scheme == "https" else None
    port = _DEFAULT_PORTS[parts.scheme] if port is None else port
    return Address(url, host, port, base=parts.path.rstrip("/"), key=key, tls=tls)


def _is_name(host: str | None) -> bool:
    """Whether it can be looked up: no label is empty or too long."""
    try:
        return bool((host or "").encode("idna"))
    except UnicodeError:
        return False


def _invalid(url: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: expected {URL}, got {url!r}")
