"""Servers in processes of their own: expertd, by the command EXPERTD, and vLLM, by `expertd-vllm serve`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_server
from typing import Any

from tests.generating import ENVIRONMENT

_START_SECONDS = 900.0  # on a busy machine, vLLM takes minutes


class Running:
    """A server on a port of its own, ready when this is made."""

    def __init__(
        self, command: Sequence[str | Path], port: int, health: str, log: Path, **variables: str
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._variables = ENVIRONMENT | os.environ | variables
        self._command, self._health, self._log = command, health, log
        try:
            self.start()
        except BaseException:
            self.kill()
            raise

    def start(self) -> None:
        """Start it, maybe once more, and wait until it is ready."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._variables, start_new_session=True
            )
        end = time.monotonic() + _START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self._command}: expected a ready server, got {self.output()[-5000:]}")
            time.sleep(0.1)

    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def ask(self, path: str, body: Any = None) -> str:
        """The text of the answer to a GET, or to a POST of JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_START_SECONDS) as response:
            answer: bytes = response.read()
        return answer.decode()

    def total(self, metric: str, expected: float) -> float:
        """A metric's sum over its labels, once it is as expected or more: steps are counted a bit later."""
        end = time.monotonic() + 30
        while True:
            lines = [line.rpartition(" ") for line in self.ask("/metrics").splitlines()]
            total = sum(float(value) for name, _, value in lines if name.partition("{")[0] == metric)
            if total >= expected or time.monotonic() > end:
                return total
            time.sleep(0.1)

    def stop(self) -> int:
        """End it by SIGTERM; the exit code."""
        self._process.terminate()
        return self._process.wait(60)

    def kill(self) -> None:
        """End it, with its children, by SIGKILL."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_healthy(self) -> bool:
        try:
            self.ask(self._health)
        except (urllib.error.URLError, OSError):
            return False
        return True


@contextmanager
def running_expertd(directory: Path, *checkpoints: Path, **variables: str) -> Iterator[Running]:
    """All MoE layers of the checkpoints, without shared experts; `variables` are added to the environment."""
    served = [{"path": str(path), "layers": "all", "shared_experts": False} for path in checkpoints]
    config, port = directory / "expertd.yaml", free_port()
    config.write_text(
        json.dumps({"checkpoints": served, "channels": {"socket": str(directory / "channels")}})
    )
    command: list[str | Path] = [os.environ["EXPERTD"], "serve", "--config", config, "--port", str(port)]
    health = "/v2/health/ready"
    yield from _until_killed(Running(command, port, health, directory / "expertd.log", **variables))


@contextmanager
def running_vllm(directory: Path, model: Path, expertd: str, *flags: str) -> Iterator[Running]:
    """vLLM with its experts at the URL `expertd`."""
    port, program = free_port(), Path(sys.executable).with_name("expertd-vllm")
    command: list[str | Path] = [
        program,
        "serve",
        model,
        "--expertd",
        expertd,
        "--port",
        str(port),
        "--max-model-len=256",
        *flags,
    ]
    yield from _until_killed(Running(command, port, "/health", directory / "vllm.log"))


def _until_killed(running: Running) -> Iterator[Running]:
    try:
        yield running
    finally:
        running.kill()


def free_port() -> int:
    """One that nobody listens on."""
    with create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
