"""A browser for the tests of a file: async tests cannot run in the thread that drives one."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.service.http.page.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started
