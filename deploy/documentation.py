"""Builds the documentation as a site: `python -m deploy.documentation build/docs` (`make docs`).

Pages are the Markdown files in docs/, and the documents in PAGES; docs/site.toml has their order. Links
to other files of the repository become links to their text. Warnings, broken links and anchors, and anything
from another host are errors. Needs Zensical (requirements/docs.txt), and otherwise only the standard library.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "client/README.md": "client.md",
    "kernels/README.md": "kernels.md",
    "examples/README.md": "examples.md",
    "engines/vllm/README.md": "expertd-vllm.md",
    "engines/sglang/README.md": "expertd-sglang.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
_ASSETS = {".svg", ".png"}
_CODE = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_LOADED = {"script", "img", "iframe", "audio", "video", "source", "link"}  # elements that a browser loads


def pages(root: Path = ROOT) -> dict[str, str]:
    """Every document that is a page, as a path in the repository, and the page's name."""
    own = {str(path.relative_to(root)): path.name for path in sorted((root / "docs").rglob("*.md"))}
    return own | PAGES


def with_links(text: str, change: Callable[[str], str]) -> str:
    """`text` with every link outside of code blocks replaced by `change` of it."""
    parts = _CODE.split(text)
    parts[::2] = [
        _LINK.sub(lambda found: f"{found[1]}{change(found[2])}{found[3]}", part) for part in parts[::2]
    ]
    return "".join(parts)


def stage(target: Path, root: Path = ROOT) -> None:
    """Write the pages, and the files that they link to, as Zensical wants them.

    Raises ValueError for a link to a file that does not exist.
    """
    known = pages(root)
    for document, page in known.items():
        folder = (root / document).parent

        def change(link: str, folder: Path = folder, document: str = document) -> str:
            path, mark, anchor = link.partition("#")
            if "://" in link or not path:
                return link
            file = Path(os.path.normpath(folder / path))
            name = str(file.relative_to(root))
            if name in known:
                return f"{known[name]}{mark}{anchor}"
            return _copied(file, name, target, f"{document}: ")

        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(with_links((root / document).read_text(), change))


def _copied(file: Path, name: str, target: Path, where: str) -> str:
    """Copy a linked file, or the list of a folder's files, into the site; returns its place there."""
    if file.suffix in _ASSETS and file.is_file():
        place = name.removeprefix("docs/")
        content = file.read_bytes()
    elif file.exists():
        place = f"source/{name}.txt"
        listed = "\n".join(sorted(path.name for path in file.iterdir())) if file.is_dir() else None
        content = file.read_bytes() if listed is None else f"{name}/\n\n{listed}\n".encode()
    else:
        raise ValueError(f"{where}expected a file of the repository, got {name!r}")
    (target / place).parent.mkdir(parents=True, exist_ok=True)
    (target / place).write_bytes(content)
    return place


class _Page(HTMLParser):
    """The anchors of a page, its links, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                (self.loaded if tag in _LOADED else self.links).append(value)


def broken(site: Path) -> list[str]:
    """What is wrong with a built site: missing files and anchors, and what comes from another host."""
    read = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in read.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded:
                    found.append(f"{path.name}: expected nothing from another host, got {link}")
                continue
            file = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            if file.is_dir():
                file /= "index.html"
            if not file.is_file():
                found.append(f"{path.name}: expected a file, got {link}")
            elif parts.fragment and file in read and unquote(parts.fragment) not in read[file].anchors:
                found.append(f"{path.name}: expected an anchor, got {link}")
    return found


def build(target: Path, root: Path = ROOT) -> Path:
    """Build the site in `target`, which is emptied before, and return its folder.

    Raises SystemExit if something is wrong with it.
    """
    shutil.rmtree(target, ignore_errors=True)
    stage(target / "source", root)
    config = shutil.copy(root / "docs" / "site.toml", target / "zensical.toml")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"}
    )
    if done.returncode:
        raise SystemExit(f"zensical: {done.stdout}{done.stderr}")
    if wrong := broken(target / "site"):
        raise SystemExit("\n".join(wrong))
    return target / "site"


def main(argv: Sequence[str] | None = None) -> None:
    """Build the site and say where it is."""
    parser = argparse.ArgumentParser(description="Builds the documentation as a site.")
    parser.add_argument("folder", type=Path, help="where to build it; what is there is removed")
    folder = parser.parse_args(argv).folder.resolve()
    print(f"the documentation is in {build(folder) / 'index.html'}")


if __name__ == "__main__":
    main()
