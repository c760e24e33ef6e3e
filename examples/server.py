"""Runs `expertd serve` as a process of its own, for examples that are not given a server's URL."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from expertd_client import ExpertClient

EXPERTD = Path(sys.executable).with_name("expertd")
READY_SECONDS = 600.0  # kernels may have to be compiled, and weights read


class ServerError(Exception):
    """The server did not become ready; the text has its output."""


@contextmanager
def run_server(
    arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of a ready `expertd serve` with these arguments, on a free port; stopped at the end.

    It has channels. `environment`: variables beside this process's. Raises ServerError, with the server's
    output, if it ends before it is ready, or is not ready in time.
    """
    command = [EXPERTD, "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        own = {"EXPERTD_CHANNELS__SOCKET": f"{directory}/channels"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stderr=output, env={**own, **os.environ, **(environment or {})}
            )
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()  # accepted requests are still answered
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerError(f"expertd serve: expected a ready server, got: {log.read_text().strip()}")
        if (listening := re.search(r"listening on (\S+)", log.read_text())) is not None:
            with ExpertClient(listening[1], transport="http") as client:
                if client.ready():
                    return listening[1]
        time.sleep(0.02)
    raise ServerError(f"expertd serve: expected a ready server within {READY_SECONDS:g} s, got none")
