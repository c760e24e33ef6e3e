"""A real server in a process of its own: the command `EXPERTD`, or else the `expertd` beside this Python."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.forked import Forked
from tests.waiting import wait_for

EXPERTD = os.environ.get("EXPERTD") or str(Path(sys.executable).parent / "expertd")
CAN_FORK = "EXPERTD" not in os.environ and not torch.cuda.is_available()
HIDDEN, TOP_K, NUM_EXPERTS = 512, 4, 16
MODEL = "demo"
LAYER = {
    "name": MODEL,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_experts": NUM_EXPERTS,
    "top_k": TOP_K,
    "weights": {"seed": 0},
    "datatype": "FP32",
}
_SECONDS = 300.0


class RunningServer:
    """A ready server; `url` is its address."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        self._start()

    def _start(self, *more: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EXPERTD_")}
        own = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self._log.parent)}
        command = [*self._command, *more]
        self.process: subprocess.Popen[bytes] | Forked
        if CAN_FORK:
            self.process = Forked(command[1:], self._log, {**environment, **own})
        else:
            with self._log.open("wb") as stderr:
                self.process = subprocess.Popen(command, stderr=stderr, env={**environment, **own})
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.end()
            raise

    def end(self, signal: int = signal.SIGKILL) -> None:
        """End the process, and wait for that."""
        self.process.send_signal(signal)
        self.process.wait()

    def start_again(self, *settings: str) -> None:
        """After its end, at the same address, with further settings."""
        port = f"port={self.url.rpartition(':')[2]}"
        self._start(*(argument for setting in (port, *settings) for argument in ("--set", setting)))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The server does nothing for a while, neither computes nor answers."""
        self.stop()
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop all threads of the server, and wait until they are."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")

        def states() -> set[str]:
            try:
                return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()}
            except FileNotFoundError:  # a thread has just ended
                return set()

        wait_for(lambda: states() == {"T"}, "all threads stop")

    def ask(self, path: str, method: str = "GET") -> Any:
        """The JSON of an answer, or None."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text else None

    def channels(self) -> list[dict[str, Any]]:
        """The open channels."""
        channels: list[dict[str, Any]] = self.ask("/v1/channels")["channels"]
        return channels

    def close_channels(self) -> None:
        """Close the open channels, except those that their callers close meanwhile."""
        for channel in self.channels():
            try:
                self.ask(f"/v1/channels/{channel['id']}", "DELETE")
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise

    def _wait_for_url(self) -> str:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server exited with {self.process.returncode}: {self._log.read_text()}"
                )
            found = re.search(r"listening on (https?://127\.0\.0\.1:\d+)", self._log.read_text())
            if found and self._is_ready(found[1]):
                return found[1]
            time.sleep(0.01)
        raise TimeoutError(f"not ready within {_SECONDS} s: {self._log.read_text()}")

    def _is_ready(self, url: str) -> bool:
        if url.startswith("https:"):  # it may ask for a certificate: its log tells
            return "engine: ready: " in self._log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=60):
                return True
        except OSError:
            return False


def channels_in(directory: Path) -> str:
    """The setting of a server with channels."""
    return f"channels.socket={directory / 'channels'}"


@contextmanager
def running_server(
    directory: Path, *settings: str, layers: Sequence[Mapping[str, Any]] = (LAYER,)
) -> Iterator[RunningServer]:
    """Small layers on a free port, with settings such as `limits.max_request_tokens=64`."""
    log, config = directory / "server.log", directory / "server.yaml"
    config.write_text(json.dumps({"models": list(layers)}))
    command = [EXPERTD, "serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0"]
    for setting in settings:
        command += ["--set", setting]
    running = RunningServer(command, log)
    try:
        yield running
    finally:
        running.end()
