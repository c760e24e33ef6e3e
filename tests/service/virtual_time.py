"""Runs a test of timers without waiting for them."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything is ready, and else jumps to its next timer.

    Not for tests with threads: what they do takes no time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0  # seconds
        selector: Any = self._selector  # type: ignore[attr-defined]
        wait = selector.select

        def select(timeout: float | None = None) -> Any:
            if timeout is None or timeout <= 0:
                return wait(timeout)
            events = wait(0)
            if not events:
                self.now += timeout
            return events

        selector.select = select

    def time(self) -> float:
        return self.now


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test, in such a loop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
