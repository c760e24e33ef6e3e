"""Programs of a benchmark in processes of their own: servers, and those that read and write lines of JSON."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

START_SECONDS = 300.0
DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"


class Program:
    """A process that reads and writes lines of JSON.

    what  a module; or a command
    """

    def __init__(self, what: str | Sequence[str], cwd: str | None = None, **environment: str) -> None:
        command = [sys.executable, "-m", what] if isinstance(what, str) else what
        self.process = subprocess.Popen(
            command, env=os.environ | environment, cwd=cwd, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.process.kill()  # it may wait until somebody reads what it has to say
        self.close()

    def write(self, value: Any) -> None:
        """Tell it something."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as `read` will say
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def read(self) -> Any:
        """What it says next. Raises RuntimeError if it has ended; stderr then says why."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"a program ended with code {self.process.wait(60)}")
        return json.loads(line)

    def close(self) -> None:
        """Have it end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@contextmanager
def running(arguments: Sequence[str], port: int, quiet: bool = True, **environment: str) -> Iterator[int]:
    """The id of a process of `python *arguments` that answers on `port`; SIGTERM ends it.

    quiet  it says nothing
    """
    command, where = [sys.executable, *arguments], subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, env=os.environ | environment, stdout=where, stderr=where)
    try:
        wait_ready(port, process)
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def server(
    *options: str, cpus: Collection[int] | None = None, quiet: bool = True
) -> Iterator[tuple[int, int]]:
    """The port and process id of `expertd serve` with these options, which is ready; cpus: None: as here."""
    limit = f"os.sched_setaffinity(0, {set(cpus)});" if cpus else ""
    run = f"import os, sys; {limit} from expertd.service.cli import main; sys.exit(main(sys.argv[1:]))"
    port = free_port()
    with running(("-c", run, "serve", *options, "--port", str(port)), port, quiet) as process:
        yield port, process


def demo_server(*settings: str, cpus: Collection[int] | None = None) -> Any:
    """As `server`, of the demo layer with these settings, as `--set` takes them."""
    options = [option for each in settings for option in ("--set", each)]
    return server("--config", str(DEMO), *options, cpus=cpus)


def wait_ready(port: int, process: "subprocess.Popen[Any]") -> None:
    """Wait until GET /v2/health/ready is answered with 200. Raises RuntimeError if the process ends."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").close()
            return
        except (OSError, urllib.error.HTTPError):
            if process.poll() is not None:
                raise RuntimeError(
                    f"server: expected it to run, got exit code {process.returncode}"
                ) from None
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
