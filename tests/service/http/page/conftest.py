"""A browser for the tests of a file: async tests cannot run in the thread that drives one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from tests.service.http.page.browser import chromium  # other tests of the page need no playwright

    with chromium() as started:
        yield started
