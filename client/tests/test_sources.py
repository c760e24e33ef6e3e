"""Which servers a list, a name and a file give."""

import socket
from pathlib import Path
from typing import Any

import pytest

from expertd_client import InvalidRequestError
from expertd_client.sources import source_of


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "url: expected http://host:port, https://host:port or unix:/path, or several, got none"),
        (["http://a", 3], "url: expected http://host:port"),
        (3, "url: expected http://host:port"),
        ("dns:name", "url: expected dns:NAME:PORT, got 'dns:name'"),
        ("dns:name:0", "url: expected dns:NAME:PORT, got 'dns:name:0'"),
        ("dns:name:70000", "url: expected dns:NAME:PORT"),
        ("file:servers", "url: expected file: with a path from /, got 'file:servers'"),
    ],
)
def test_lists_that_are_none(given: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        source_of(given)
    assert str(caught.value).startswith(text)


def test_the_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, type: int) -> list[Any]:
        assert (host, port) == ("experts", 8000)
        places = [("10.0.0.1", 8000), ("10.0.0.2", 8000), ("fd00::1", 8000, 0, 0), ("10.0.0.1", 8000)]
        return [(socket.AF_INET, type, 6, "", place) for place in places]

    monkeypatch.setattr("expertd_client.sources.socket.getaddrinfo", look_up)
    source = source_of("dns:experts:8000")
    assert source is not None
    assert source.urls() == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]


def test_a_file_of_servers(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    source = source_of(f"file:{file}")
    assert source is not None
    with pytest.raises(OSError, match="No such file"):
        source.urls()
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match="expected a URL in each line, got none"):
        source.urls()
    file.write_text("http://a:1\n\n  unix:/b \n# http://c\nhttp://a:1\n")
    assert source.urls() == ["http://a:1", "unix:/b"]
    assert source_of("http://a:1") is None
