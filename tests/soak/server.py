"""The server of a soak: started, watched, ended and started again on the same ports."""

import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from expertd.service.settings.model import Settings
from tests.service.apps import tiny_settings
from tests.service.keys import write_keys
from tests.service.processes import EXPERTD, clean_environment
from tests.service.waiting import wait_for

RIGHTS: dict[str, list[str]] = {"infer": ["infer"], "admin": ["admin"], "metrics": ["metrics"]}


def free_port() -> int:
    """One that nobody uses at present."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def soak_settings(folder: Path, **changes: Any) -> Settings:
    """Everything on."""
    return tiny_settings(
        {"max_queue_requests": 512, "max_queue_tokens": 4096},
        host="127.0.0.1",
        port=free_port(),
        grpc={"port": free_port()},
        channels={"socket": str(folder / "channels")},
        shared_memory={"enabled": True},
        keys=str(write_keys(folder / "keys.yaml", **RIGHTS)),
        keep_alive_seconds=3600,
        **changes,
    )


class SoakServer:
    """`expertd serve` with these settings."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.port = settings.port
        self.log = folder / "server.log"
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        with self.log.open("ab") as stderr:
            command: list[str | Path] = [EXPERTD, "serve", "--config", self._config]
            self._process = subprocess.Popen(command, stderr=stderr, env=clean_environment())
        wait_for(self._is_ready, f"the server is ready: {self.log}")

    def terminate(self, seconds: float = 60.0) -> int:
        """Send SIGTERM, and wait: the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(seconds)

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def memory(self) -> int:
        """Bytes that are the process's own."""
        found = re.search(r"^RssAnon:\s+(\d+) kB", self._proc("status").read_text(), re.M)
        assert found
        return 1024 * int(found[1])

    def descriptors(self) -> int:
        return len(list(self._proc("fd").iterdir()))

    def mistakes(self) -> list[str]:
        """Lines of the log that no soak should cause."""
        lines = self.log.read_text().splitlines()
        wrong = re.compile("Traceback|internal error|gRPC call failed|unanswered")
        places = [place for place, line in enumerate(lines) if wrong.search(line)]
        return ["\n".join(lines[max(0, place - 1) : place + 30]) for place in places[:10]]

    def _proc(self, name: str) -> Path:
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/{name}")

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(
                f"the server exited with {self._process.returncode}: {self.log.read_text()[-2000:]}"
            )
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
                sock.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return sock.recv(12) == b"HTTP/1.1 200"
        except OSError:
            time.sleep(0.05)
            return False
