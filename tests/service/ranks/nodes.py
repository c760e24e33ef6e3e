"""Other nodes on this machine: agents in processes of their own, which meet the front end on loopback."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from expertd.service.settings.model import Settings
from tests.service.apps import tiny_settings
from tests.service.forking import CAN_FORK
from tests.service.http.processes import alive
from tests.service.processes import EXPERTD, clean_environment, started
from tests.service.ranks.servers import rank_processes
from tests.service.sockets import free_port
from tests.service.waiting import wait_for


def node_settings(limits: Mapping[str, float] | None = None, **changes: Any) -> Settings:
    """Settings of node 0 of two with a rank each, for the model "tiny"."""
    given = {
        "nnodes": 2,
        "rendezvous": f"127.0.0.1:{free_port()}",
        "rendezvous_timeout_seconds": 120,
        **changes,
    }
    return tiny_settings(limits, **given)


class Agent:
    """`expertd serve --node-rank 1` under test."""

    def __init__(self, settings: Settings, directory: Path, name: str = "agent", fork: bool = True) -> None:
        config = directory / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        self._log = directory / f"{name}.log"
        # As `expertd` does, which need not be installed where GPUs are.
        program = "import sys; from expertd.service.cli import main; sys.exit(main())"
        command: list[str | Path] = [EXPERTD] if CAN_FORK else [sys.executable, "-P", "-c", program]
        command += ["serve", "--config", config, "--node-rank", "1"]
        with self._log.open("wb") as log:
            environment = clean_environment(OMP_NUM_THREADS="1")  # node 0 needs cores, too
            self.process = started(command, log, environment, fork)

    def log(self) -> str:
        """Its output so far."""
        return self._log.read_text()

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return rank_processes(self.process.pid)

    def kill(self) -> None:
        """End it at once; its ranks end by themselves."""
        ranks = self.ranks() if self.process.poll() is None else []
        for pid in (self.process.pid, *ranks):
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not any(map(alive, ranks)), "the agent's ranks end")


@contextmanager
def agent(settings: Settings, directory: Path, name: str = "agent", fork: bool = True) -> Iterator[Agent]:
    """An agent of node 1, which may have no front end yet; `fork`: see `started`."""
    one = Agent(settings, directory, name, fork)
    try:
        yield one
    finally:
        one.kill()
