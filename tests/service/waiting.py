"""Polling for a condition, bounded in time."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Return once `condition` holds; TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def wait_for(check: Callable[[], T | None], what: str, seconds: float = 120.0) -> T:
    """The first truthy result of `check`; TimeoutError, naming `what`, after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := check():
            return result
        time.sleep(0.01)
    raise TimeoutError(f"not within {seconds} s: {what}")
