"""The site of `make docs` in a browser: nothing comes from elsewhere, and the search finds things."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from deploy.documentation import pages
from tests.paths import ROOT
from tests.service.http.page.browser import chromium, needs_chromium, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SITE = ROOT / "build" / "docs" / "site"
pytestmark = [
    needs_chromium,
    pytest.mark.slow,
    pytest.mark.skipif(not SITE.is_dir(), reason="needs the site of `make docs`"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: each request would be a line."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as started:
        yield started


def test_pages_load_everything_from_their_own_host(browser: "Browser", url: str) -> None:
    """Those with pictures; `make docs` has read what every page loads."""
    with_pictures = [page for document, page in pages().items() if "![" in (ROOT / document).read_text()]
    assert len(with_pictures) > 5
    with visit(browser, f"{url}/index.html") as visited:
        for page in with_pictures:
            visited.page.goto(f"{url}/{page.removesuffix('.md')}.html")
            assert visited.page.locator("h1").count() == 1, page
            pictures = visited.page.locator("article img").evaluate_all(
                "images => images.every(image => image.complete && image.naturalWidth > 0)"
            )
            assert pictures, page
        assert visited.hosts == {url.removeprefix("http://")}
        assert visited.errors == []


def test_the_search_finds_a_setting(browser: "Browser", url: str) -> None:
    with visit(browser, f"{url}/index.html", scheme="dark") as visited:
        visited.page.keyboard.press("Control+k")
        visited.page.keyboard.type("prefill_chunk_tokens")
        visited.page.get_by_role("link", name="Steps and lanes").first.wait_for()
        assert visited.hosts == {url.removeprefix("http://")}
        assert visited.errors == []
