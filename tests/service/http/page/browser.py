"""A headless Chromium, pages that remember what went wrong in them, and a server in a thread for both."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, TimeoutError, sync_playwright

from expertd.service.engine.loading import Loader
from expertd.service.settings.model import Settings
from tests.service.apps import serving

CHROMIUM = shutil.which("chromium")
_MILLISECONDS = 10_000
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


class Visit:
    """A page, the errors in its console, and what it asked of other hosts than its own."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def text(self, selector: str) -> str:
        """The text that an element shows."""
        return self.page.locator(selector).inner_text()

    def wait_text(self, selector: str, pattern: str) -> str:
        """The text of an element once it matches a pattern of JavaScript."""
        condition = "([s, p]) => new RegExp(p).test(document.querySelector(s)?.innerText ?? '')"
        try:
            self.page.wait_for_function(condition, arg=[selector, pattern])
        except TimeoutError as error:
            raise AssertionError(f"expected {pattern!r}, got {self.text(selector)!r}") from error
        return self.text(selector)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without its sandbox, because CI runs as root."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visit(
    browser: Browser, url: str, width: int = 1280, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Visit]:
    """The page at `url`, in a context of its own."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(_MILLISECONDS)
    made = Visit(context.new_page())
    made.page.goto(url)
    yield made
    context.close()


@contextmanager
def serving_in_thread(settings: Settings, loader: Loader) -> Iterator[str]:
    """The address of a running application."""
    begun, ports = threading.Event(), []
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with serving(settings, loader) as server:
            ports.append(server.port)
            begun.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert begun.wait(60)
        yield f"http://127.0.0.1:{ports[0]}/"
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
