"""Servers forked from a process that has imported this Python's `expertd`: imports take seconds."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytest", "tests.preloaded"])


class Forked:
    """What the tests use of subprocess.Popen, for `expertd ARGUMENTS`, which writes to `log`."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        log.touch()
        self._process = _FORKS.Process(target=_run, args=(arguments, log, environment), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("expertd", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Do what the command does in a new process."""
    import torch  # as the server has: not where only a command is installed

    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = ["expertd", *arguments]
    (command,) = entry_points(group="console_scripts", name="expertd")
    sys.exit(command.load()())
