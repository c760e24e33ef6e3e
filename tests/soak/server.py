"""The server of a soak: started, watched, ended and started again on the same ports."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml

from expertd.backends import BACKENDS
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.settings.model import Settings
from tests.service.apps import MODEL, tiny_settings
from tests.service.children import children_of, command_of
from tests.service.keys import bearer, write_keys
from tests.service.processes import EXPERTD, clean_environment
from tests.service.sockets import free_port
from tests.service.waiting import wait_for
from tests.soak.reference import MAX_TOKENS
from tests.soak.tally import Phase, Stage

START_SECONDS = 300.0  # on a GPU, where the first start compiles kernels
RIGHTS: dict[str, list[str]] = {"infer": ["infer"], "admin": ["admin"], "metrics": ["metrics"]}


COMING = "coming"
"""The model that is unloaded and loaded again; the same layer as the other one."""


def soak_settings(folder: Path, **changes: Any) -> Settings:
    """Everything on that one process of one rank has; the weights are in a file, the same on every device."""
    path = folder / "weights.safetensors"
    save_weights(path, random_weights(tiny_settings().models[0].shape, 0, torch.device("cpu")))
    model = {**MODEL, "weights": {"path": str(path)}}
    return tiny_settings(
        {
            "max_queue_requests": 512,
            "max_queue_tokens": 4096,
            "max_request_tokens": MAX_TOKENS,
            "prefill_chunk_tokens": 16,
        },
        models=[model, {**model, "name": COMING}],
        host="127.0.0.1",
        port=free_port(),
        grpc={"port": free_port()},
        channels={"socket": str(folder / "channels")},
        shared_memory={"enabled": True},
        keys=str(write_keys(folder / "keys.yaml", **RIGHTS)),
        keep_alive_seconds=3600,
        **changes,
    )


def several(settings: Settings, devices: str | None) -> Settings:
    """The same server with two HTTP processes, and two ranks; on GPUs, a rank on each of `devices`."""
    ranks = {"devices": devices} if devices else {"ranks": 1 if BACKENDS[settings.backend].on_gpu else 2}
    return Settings.model_validate({**settings.model_dump(), "http_workers": 2, **ranks})


def with_lanes(settings: Settings) -> Settings:
    """The same server, with short requests on a lane of their own."""
    return Settings.model_validate({**settings.model_dump(), "lanes": {"decode_max_tokens": 4}})


def stop(server: "SoakServer", stage: Stage) -> int:
    """End a server by SIGTERM under its callers: its exit code.

    It answers two health checks before the signal. Its event loop reads in the order of arrival, so by then
    it has read every request that was sent whole before the phase changed: it must answer or refuse it.
    """
    stage.phase = Phase.STOPPING
    for _ in range(2):
        assert is_ready(server.port)
    return server.terminate()


def is_ready(port: int) -> bool:
    """Whether a server on this machine says so."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return sock.recv(12) == b"HTTP/1.1 200"
    except OSError:
        time.sleep(0.05)
        return False


class SoakServer:
    """`expertd serve`, one after the other on the same ports.

    expertd    the command
    variables  of its environment
    """

    def __init__(self, port: int, folder: Path, expertd: str | Path = EXPERTD, **variables: str) -> None:
        self.port = port
        self._expertd, self._variables = expertd, variables
        self.log = folder / "server.log"
        self._config = folder / "config.yaml"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of its port."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, settings: Settings) -> None:
        """Start it, and wait until it is ready."""
        self._config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        # Its callers need the same cores, which idle threads of OpenMP would keep.
        environment = clean_environment(OMP_WAIT_POLICY="passive", **self._variables)
        with self.log.open("ab") as stderr:
            command: list[str | Path] = [self._expertd, "serve", "--config", self._config]
            self._process = subprocess.Popen(command, stderr=stderr, env=environment)
        wait_for(self._is_ready, f"the server is ready: {self.log}", START_SECONDS)

    def terminate(self, seconds: float = 60.0) -> int:
        """Send SIGTERM, and wait: the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(seconds)

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of all processes that it has started."""
        assert self._process is not None
        children = self.children("")
        self._process.kill()
        self._process.wait()
        wait_for(lambda: not any(map(command_of, children)), "its processes end with the engine", 20)

    def children(self, module: str) -> list[int]:
        """The processes of it that run a module, or all."""
        assert self._process is not None
        return children_of(self._process.pid, module)

    def kill_child(self, module: str, again: str) -> None:
        """Send SIGKILL to the last process that runs a module; wait until the log says `again` once more."""
        count = self.log.read_text().count(again)
        os.kill(self.children(module)[-1], signal.SIGKILL)
        wait_for(lambda: self.log.read_text().count(again) > count, f"{module} is there again")
        wait_for(self._is_ready, f"the server is ready: {self.log}")

    def memory(self) -> int:
        """Bytes that are the process's own."""
        found = re.search(r"^RssAnon:\s+(\d+) kB", self._proc("status").read_text(), re.M)
        assert found
        return 1024 * int(found[1])

    def descriptors(self) -> int:
        return len(list(self._proc("fd").iterdir()))

    def threads(self) -> int:
        return len(list(self._proc("task").iterdir()))

    def device_memory(self) -> int:
        """Bytes of the GPU that are in use."""
        text = httpx.get(
            f"http://127.0.0.1:{self.port}/metrics", headers=bearer("metrics"), timeout=30, verify=False
        ).text
        found = re.search(r"^expertd_device_memory_used_bytes (\S+)", text, re.M)
        assert found
        return int(float(found[1]))

    def mistakes(self) -> list[str]:
        """Lines of the log that no soak should cause."""
        lines = self.log.read_text().splitlines()
        wrong = re.compile("Traceback|RuntimeWarning|internal error|gRPC call failed|unanswered")
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
        return is_ready(self.port)
