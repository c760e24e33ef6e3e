"""What `make docs` calls broken, and what it makes of links."""

from pathlib import Path

import pytest

from deploy import documentation


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the documents that are pages, and two of its own."""
    for name in (
        *documentation.PAGES,
        "docs/one.md",
        "docs/two.md",
        "docs/inside/three.md",
        "service/app.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# Title\n")
    return tmp_path


def test_links_become_pages_and_copies(root: Path, tmp_path: Path) -> None:
    text = "[a](two.md#x) [b](../client/README.md) [c](../service/app.py) [d](../service/)"
    text += " [e](https://a.b) [f](inside/three.md)"
    (root / "docs" / "one.md").write_text(f"{text}\n```\n[kept](nowhere.md)\n```\n")
    documentation.stage(tmp_path / "site", root)
    changed = "[a](two.md#x) [b](client.md) [c](source/service/app.py.txt) [d](source/service.txt)"
    changed += " [e](https://a.b) [f](three.md)"
    assert (tmp_path / "site" / "one.md").read_text() == f"{changed}\n```\n[kept](nowhere.md)\n```\n"
    assert (tmp_path / "site" / "source/service/app.py.txt").read_text() == "# Title\n"
    assert (tmp_path / "site" / "source/service.txt").read_text() == "service/\n\napp.py\n"


def test_a_link_to_nothing_is_an_error(root: Path, tmp_path: Path) -> None:
    (root / "docs" / "one.md").write_text("[a](../service/gone.py)")
    with pytest.raises(
        ValueError, match=r"one.md: expected a file of the repository, got 'service/gone.py'$"
    ):
        documentation.stage(tmp_path / "site", root)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('<a href="other.html#there">', None),
        ('<a href="https://elsewhere.org/">', None),
        ('<a href="gone.html">', "page.html: expected a file, got gone.html"),
        ('<a href="other.html#nowhere">', "page.html: expected an anchor, got other.html#nowhere"),
        ('<img src="gone.svg">', "page.html: expected a file, got gone.svg"),
        (
            '<script src="https://cdn.org/x.js"></script>',
            "page.html: expected nothing from another host, got https://cdn.org/x.js",
        ),
        (
            '<link rel="stylesheet" href="//fonts.org/x.css">',
            "page.html: expected nothing from another host, got //fonts.org/x.css",
        ),
    ],
)
def test_what_is_broken(tmp_path: Path, written: str, said: str | None) -> None:
    (tmp_path / "page.html").write_text(written)
    (tmp_path / "other.html").write_text('<h2 id="there">There</h2>')
    assert documentation.broken(tmp_path) == ([said] if said else [])
