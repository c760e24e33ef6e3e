"""The page's own files: nothing inline, nothing from elsewhere, and nothing that is missing."""

import re
from html.parser import HTMLParser

from expertd.service.engine.refusals import REASONS
from tests.paths import ROOT
from tests.service.apps import error_of, serving, tiny_settings

PAGE = ROOT / "service" / "http" / "page"
FILES = sorted(path.name for path in PAGE.iterdir())
MODULES = [name for name in FILES if name.endswith(".js")]
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed((PAGE / "index.html").read_text())
    return parser.found


def test_the_page_has_neither_inline_scripts_nor_styles() -> None:
    for tag, attributes in elements():
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag


def test_it_loads_its_own_files_by_relative_urls() -> None:
    urls = [attributes.get("src") or attributes.get("href") for _, attributes in elements()]
    assert sorted(url for url in urls if url) == [
        "docs",
        "docs",
        "metrics",
        "page/icon.svg",
        "page/main.js",
        "page/page.css",
    ]
    for name in FILES:
        text = (PAGE / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?:|//[a-z]|@import|url\(", re.sub(r"^//.*| // .*", "", text, flags=re.M)
        ), name


def test_every_module_is_used_and_there() -> None:
    imported = {
        name for file in MODULES for name in re.findall(r'from "\./(.*)";', (PAGE / file).read_text())
    }
    assert imported | {"main.js"} == set(MODULES)


def test_every_reason_has_its_meaning() -> None:
    named = re.findall(r"^  (\w+): ", (PAGE / "reasons.js").read_text(), re.M)
    assert named == list(REASONS)


def test_every_id_that_a_script_names_is_in_the_page() -> None:
    ids = [attributes["id"] for _, attributes in elements() if "id" in attributes]
    assert len(set(ids)) == len(ids)
    named = {name for file in MODULES for name in re.findall(r'byId\("(.*?)"\)', (PAGE / file).read_text())}
    assert named <= set(ids)


async def test_files_have_their_type_and_a_strict_policy_and_no_other_is_served() -> None:
    async with serving(tiny_settings()) as server:
        for name in FILES:
            answer = await server.http.get("/" if name == "index.html" else f"/page/{name}")
            assert (answer.status_code, answer.content) == (200, (PAGE / name).read_bytes())
            assert answer.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
        for name in ("none.js", "..%2Fapp.py", "%2e%2e%2fapp.py", "app.py", "", ".", "x%00.js"):
            assert error_of(await server.http.get(f"/page/{name}"), 404)
