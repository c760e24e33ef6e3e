"""URLs of servers."""

from typing import Any

import pytest

from expertd_client import ExpertClient, InvalidRequestError
from expertd_client.address import parse_address


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "authority", "local"),
    [
        ("http://localhost:8000", "localhost", 8000, None, "localhost:8000", True),
        ("http://127.0.0.2:1", "127.0.0.2", 1, None, "127.0.0.2:1", True),
        ("http://[::1]:8000/", "::1", 8000, None, "[::1]:8000", True),
        ("http://experts", "experts", 80, None, "experts", False),
        ("http://10.0.0.1:8000", "10.0.0.1", 8000, None, "10.0.0.1:8000", False),
        ("unix:/run/e.sock", "localhost", 80, "/run/e.sock", "localhost", True),
        ("unix:///run/e.sock", "localhost", 80, "/run/e.sock", "localhost", True),
    ],
)
def test_addresses(url: str, host: str, port: int, path: str | None, authority: str, local: bool) -> None:
    address = parse_address(url)
    assert (address.host, address.port, address.path) == (host, port, path)
    assert (address.authority, address.is_local, address.base) == (authority, local, "")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "https://",
        "ftp://localhost:8000",
        "http://",
        "http://:80",
        "http://a:b",
        "http://a:99999",
        "http://[::1",
        "http://user@a",
        "http://a..b",
        f"http://{64 * 'a'}",
        "http://a?x=1",
        "http://a#x",
        "http://a b",
        "http://a\r\nX: y",
        "http://ü",
        "unix:",
        "unix:relative",
        "unix://",
        None,
        b"http://a",
    ],
)
def test_addresses_that_are_none(url: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^url: expected http://host:port, https://host:port or unix:/path, got "
    ):
        ExpertClient(url)
