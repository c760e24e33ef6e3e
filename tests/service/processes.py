"""Servers in their own processes, on free ports, which are always ended."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, TypeAlias

import httpx
import yaml

from expertd.service.settings.model import Settings
from tests.service.forking import CAN_FORK, ForkedProcess
from tests.service.waiting import wait_for

Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"

EXPERTD = Path(sys.executable).parent / "expertd"


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without the server's settings, and with two threads for torch."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EXPERTD_")}
    return {**kept, "OMP_NUM_THREADS": "2", **more}


def _default_hangup() -> None:
    """Undo `nohup`, under which these tests may run."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def started(
    command: Sequence[str | Path],
    stderr: IO[bytes],
    environment: Mapping[str, str],
    fork: bool = True,
    stdout: IO[bytes] | None = None,
) -> Process:
    """`expertd`, forked from a process that has imported it; else, and where GPUs are, in a new process."""
    if fork and CAN_FORK:
        return ForkedProcess(command, stdout=stdout, stderr=stderr, env=environment, has_children=True)
    return subprocess.Popen(
        command, stdout=stdout, stderr=stderr, env=environment, preexec_fn=_default_hangup
    )


class ServerProcess:
    """`expertd serve` under test."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log
        found = wait_for(self._listening, "the server listens", 300)
        self.scheme, self.port = found[1], int(found[2])
        self.url = f"127.0.0.1:{self.port}"

    def log(self) -> str:
        """The server's output so far, without a line that is being written."""
        text = self._log.read_text()
        return text[: text.rfind("\n") + 1]

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """GET on a new connection, without the system's certificates, which take longer to read than this."""
        return httpx.get(f"{self.scheme}://{self.url}{path}", headers=headers, timeout=60, verify=False)

    def wait_ready(self) -> None:
        """Wait until the server is ready."""
        wait_for(self._ready, "the server is ready", 300)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def _ready(self) -> bool:
        self._check_alive()
        try:
            return self.get("/v2/health/ready").status_code == 200
        except httpx.ConnectError:  # the server has just ended: the next call reports its log
            return False

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server exited with {self.process.returncode}: {self.log()}")

    def _listening(self) -> re.Match[str] | None:
        self._check_alive()
        return re.search(r"listening on (https?)://127\.0\.0\.1:(\d+)", self.log())


def grpc_address(server: ServerProcess) -> str:
    """Where a server listens for gRPC."""
    text = "the server listens for gRPC"
    return wait_for(lambda: re.search(r"gRPC: listening on ([\w.:]+)", server.log()), text)[1]


@contextmanager
def server_process(
    settings: Settings,
    directory: Path,
    fork: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ServerProcess]:
    """A ready server with these settings on a free port of the loopback interface. See `serving`."""
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    with serving(["--config", config], directory, fork, **environment) as server:
        yield server


@contextmanager
def serving(
    arguments: Sequence[str | Path], directory: Path, fork: bool = True, **environment: str
) -> Iterator[ServerProcess]:
    """A ready `expertd serve` with these arguments and variables on a free port of the loopback interface.

    fork  see `started`
    """
    log = directory / "server.log"
    command: list[str | Path] = [EXPERTD, "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as stderr:
        clean = clean_environment(**{"XDG_RUNTIME_DIR": str(directory), **environment})
        process = started(command, stderr, clean, fork)
    try:
        server = ServerProcess(process, log)
        server.wait_ready()
        yield server
    finally:
        process.kill()
        process.wait()


def expertd(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `expertd` with these arguments and variables until it exits; see `started`."""
    return _run([EXPERTD, *arguments], environment, True)


def new_expertd(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """As `expertd`, in a new process: not forked."""
    return _run([EXPERTD, *arguments], environment, False)


def forked_python(script: Path) -> "subprocess.CompletedProcess[str]":
    """Run a program that imports the server until it exits; see `started`."""
    return _run([sys.executable, script], {}, True)


def _run(
    command: Sequence[str | Path], environment: Mapping[str, str], fork: bool
) -> "subprocess.CompletedProcess[str]":
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = started(command, stderr, clean_environment(**environment), fork, stdout)
        try:
            code = process.wait(240)
        finally:
            process.kill()
            process.wait()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, stdout.read().decode(), stderr.read().decode())
