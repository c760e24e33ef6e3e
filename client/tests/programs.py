"""Programs of tests in processes of their own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {
    "PYTHONPATH": ":".join(entry for entry in sys.path if entry),
    "OPENBLAS_NUM_THREADS": "1",
}


def run(program: str, *arguments: str) -> str:
    """The output of a program that is expected to end with 0, without a word of errors."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class Program:
    """A running program: `tell` writes a line to its stdin, `says` reads its stdout."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def says(self, line: str) -> bool:
        """Whether this is its next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline() == f"{line}\n"


@contextmanager
def running(program: str, *arguments: str) -> Iterator[Program]:
    """A program for a block, at whose end it is killed, and what it has forked."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Program(process)
        finally:
            subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=False)
