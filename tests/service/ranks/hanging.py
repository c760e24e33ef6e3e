"""Ranks that hang on demand: not their process, which is not stopped, but the thread that runs steps."""

import os
import signal
from pathlib import Path

import pytest

# Python runs it at its start, in every rank. The main thread, which runs the steps, takes the signal.
_PROGRAM = """
import signal, threading
signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
"""


def allow_hanging(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes that start from now on hang when `hang` says so."""
    (directory / "sitecustomize.py").write_text(_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)


def hang(process: int) -> None:
    """Keep a process from ending its present step, or the next one."""
    os.kill(process, signal.SIGUSR1)
