"""Processes that call a server at the same time: all of them are ready before what counts begins."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any, Self

POWER_SECONDS = 2.0  # that a GPU takes to reach the clock that its power limit allows


class CallerProcess:
    """A process of a module that reads and writes lines of JSON."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()  # it may wait until somebody reads what it has to say
        self.close()

    def write(self, value: Any) -> None:
        """Tell it something."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as `read` will say
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def read(self) -> Any:
        """What it says next. Raises RuntimeError if it has ended; stderr then says why."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a caller ended with code {self._process.wait(60)}")
        return json.loads(line)

    def close(self) -> None:
        """Have it end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def together(module: str, given: dict[str, Any], processes: int, lead: float) -> list[float]:
    """What all callers of these processes have measured in the same `given["seconds"]`, sorted.

    lead  seconds for which they keep the server busy before
    """
    with ExitStack() as stack:
        callers = [stack.enter_context(CallerProcess(module)) for _ in range(processes)]
        for caller in callers:
            caller.write(given)
        for caller in callers:
            caller.read()
        begin = time.perf_counter() + lead
        for caller in callers:
            caller.write(begin)
        return sorted(latency for caller in callers for latency in caller.read())


def window(seconds: float) -> tuple[float, float]:
    """Of a caller that is ready: from when to when requests count. Returns once all others are ready, too.

    Times are those of time.perf_counter, which all processes share.
    """
    print(json.dumps("ready"), flush=True)
    begin: float = json.loads(sys.stdin.readline())
    return begin, begin + seconds
