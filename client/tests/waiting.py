"""Waiting for something that another process does."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Until `condition` holds; fails with `what` was expected."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"expected that {what}"
        time.sleep(0.005)
