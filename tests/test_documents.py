"""The documents match the code: links resolve, tables are up to date, commands exist."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from starlette.routing import Route

from deploy import diagrams
from deploy.documentation import pages
from expertd.service.checkpoints import table
from expertd.service.checkpoints.families import FAMILIES
from expertd.service.http.app import ExpertApp
from expertd.service.http.rights import ANY, CALLS
from expertd.service.settings.loader import load_settings
from expertd.service.settings.model import Settings
from tests.paths import DEMO, ROOT
from tests.test_chores import CHORES

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(
            ROOT / name / "README.md"
            for name in ("kernels", "client", "examples", "engines/vllm", "engines/sglang")
        ),
    )
)
_CODE = re.compile(r"^```.*?^```$", re.M | re.S)


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def anchors(document: str) -> set[str]:
    """The anchors that GitHub derives from a document's headings."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", text_of(document)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    folder = (ROOT / document).parent
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)", _CODE.sub("", text_of(document))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(str(target.relative_to(ROOT)))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_modules_and_chores_exist(document: str) -> None:
    # The changelog also names what has been removed.
    text = re.sub(r"^### Removed$.*?(?=^##|\Z)", "", text_of(document), flags=re.M | re.S)
    modules = set(re.findall(r"python\s+-m\s+(\w[\w.]*\w)", text))
    assert [name for name in modules if find_spec(name) is None] == []
    chores = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M))
    assert sorted(chores - set(CHORES)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_yaml_blocks_are_settings(document: str) -> None:
    served = yaml.safe_load(DEMO.read_text())
    for block in re.findall(r"^```yaml\n(.*?)^```$", text_of(document), re.M | re.S):
        given = yaml.safe_load(block)
        settings = Settings.model_validate(served | given)
        assert given.keys() <= settings.model_fields_set


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_environment_variables_are_settings(document: str) -> None:
    beside = {
        "EXPERTD_CA",
        "EXPERTD_CACHE_DIR",
        "EXPERTD_CONFIG",
        "EXPERTD_KEY",
        "EXPERTD_SERVICE_HOST",
    }  # the last is Kubernetes'
    named = set(re.findall(r"\bEXPERTD_\w+[A-Z]", text_of(document))) - beside
    fields = {name.removeprefix("EXPERTD_").lower().split("__")[0] for name in named}
    assert fields <= set(Settings.model_fields)


def test_every_document_is_a_page_of_the_site() -> None:
    listed = tomllib.loads(text_of("docs/site.toml"))["project"]["nav"]
    in_order = re.findall(r"'([\w-]+\.md)'", str(listed))
    assert sorted(in_order) == sorted(pages().values())
    assert set(pages()) == set(DOCUMENTS)


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - {"CHANGELOG.md"}))
def test_a_document_can_be_read_in_ten_minutes(document: str) -> None:
    """At 240 words a minute, tables and figures aside, which are for looking things up."""
    text = re.sub(r"<!-- report:.*?<!-- /report -->", "", _CODE.sub("", text_of(document)), flags=re.S)
    assert len(re.sub(r"^\|.*$", "", text, flags=re.M).split()) <= 2400


def test_lists_begin_after_an_empty_line() -> None:
    """Else the site, unlike GitHub, takes them for a part of the paragraph."""
    joined = re.compile(r"^(?! *(?:[-*]|\d+\.) | {2}|\|)[^\n]+\n[-*] .*$", re.M)
    found = [(name, text) for name in DOCUMENTS for text in joined.findall(_CODE.sub("", text_of(name)))]
    assert found == []


@pytest.mark.parametrize("source", sorted(diagrams.PICTURES.glob("*.dot")), ids=lambda path: path.name)
def test_diagrams_are_drawn_from_their_sources(source: Path) -> None:
    drawn = source.with_suffix(".svg").read_text()
    assert diagrams.digest(source) in drawn, "python -m deploy.diagrams"
    assert any(f"pictures/{source.stem}.svg)" in text_of(document) for document in DOCUMENTS)


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 170


def test_the_api_table_matches_the_app() -> None:
    app = ExpertApp(load_settings(DEMO))
    documented = {
        f"{method.upper()} {path}" for path, calls in app.openapi()["paths"].items() for method in calls
    }
    pages = [route for route in app.routes if isinstance(route, Route) and not route.include_in_schema]
    beside = {f"GET {route.path}" for route in pages if "{" not in route.path}
    rows = re.findall(r"^\| `([A-Z]+ [^`]+)` \|", text_of("docs/http.md"), re.M)
    assert sorted(rows) == sorted(documented | beside)


def test_the_tables_of_families_and_encodings_match_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    named = re.findall(r"^\|.*?\| `(\w+)` \|", table.families_table(), re.M)
    assert sorted(name for name in named if name != "model_type") == sorted(FAMILIES)
    assert table.main([str(ROOT / "docs" / "checkpoints.md"), "--check"]) == 0, capsys.readouterr().err


def test_the_changelogs_newest_release_is_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = re.findall(r"^## (\S+)$", text_of("CHANGELOG.md"), re.M)
    assert entries.count("Unreleased") <= 1
    assert entries[entries[0] == "Unreleased"] == project["version"]


def test_the_api_table_names_the_rights() -> None:
    rows = dict(re.findall(r"^\| `([A-Z]+ [^`]+)` \| ([^|]+) \|", text_of("docs/http.md"), re.M))
    files = ("GET /docs/{name}", "GET /page/{name}")
    named = {call: " or ".join(rights) or "none" for call, rights in CALLS.items() if call not in files}
    assert rows == {call: "any" if CALLS[call] == ANY else text for call, text in named.items()}
