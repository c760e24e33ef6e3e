"""The processes that send, so that one Python process is not what is measured."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, cast

from expertd_client.bench.case import BenchError, BenchTarget, Case, Result, Sample, summarize
from expertd_client.bench.load import work

_HEAD_START = 0.05  # seconds for the common start to reach every process


_ENDED = "a process that sends requests: expected it to go on, got its end"


class Processes:
    """Up to `count` processes that send to one target; ended with the block."""

    def __init__(self, target: BenchTarget, count: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy this process's threads' locks
        self._pipes: list[Connection] = []
        self._processes = []
        for seed in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, target, seed), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def measure(self, case: Case, progress: Callable[[float], None]) -> Result:
        """Run one case; `progress` gets the seconds since its last call. Raises BenchError."""
        shares = _shares(case.connections, len(self._pipes))
        pipes = self._pipes[: len(shares)]
        for pipe, share in zip(pipes, shares, strict=True):
            rate = None if case.rate is None else case.rate * share / case.connections
            _send(pipe, (case, share, rate))
        _receive(pipes, progress)
        start = time.monotonic() + _HEAD_START
        for pipe in pipes:
            _send(pipe, start)
        samples: list[Sample] = _receive(pipes, progress)
        return summarize(case, samples)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            if kind is not None:
                process.terminate()
            process.join()


def _send(pipe: Connection, value: object) -> None:
    try:
        pipe.send(value)
    except (BrokenPipeError, ConnectionResetError):
        raise BenchError(_ENDED) from None


def _receive(pipes: list[Connection], progress: Callable[[float], None]) -> list[Any]:
    """One value from each pipe. Raises BenchError if a process sends that instead, or ends."""
    values: dict[Any, Any] = {}
    last = time.monotonic()
    while len(values) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in values]
        for pipe in cast("list[Connection]", wait(waiting, timeout=0.2)):
            try:
                values[pipe] = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise BenchError(_ENDED) from None
            if isinstance(values[pipe], BenchError):
                raise values[pipe]
        now = time.monotonic()
        progress(now - last)
        last = now
    return [values[pipe] for pipe in pipes]


def _shares(connections: int, processes: int) -> list[int]:
    """`connections` split evenly over at most this number of processes."""
    count = min(connections, processes)
    return [connections // count + (number < connections % count) for number in range(count)]
