"""A server in a process of its own: the command EXPERTD, or else the `expertd` beside this Python."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_server

_EXPERTD = os.environ.get("EXPERTD") or str(Path(sys.executable).with_name("expertd"))
_SECONDS = 120.0


@contextmanager
def serving(checkpoint: Path, directory: Path) -> Iterator[str]:
    """Its address, once it has all layers of a checkpoint, without shared experts."""
    with create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    log, port = directory / "log", url.rpartition(":")[2]
    command = [_EXPERTD, "serve", "--model", str(checkpoint), "--shared-experts", "false", "--port", port]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(directory)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=variables, start_new_session=True
        )
    try:
        end = time.monotonic() + _SECONDS
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command}: expected a ready server, got {log.read_text()}")
            time.sleep(0.1)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=60):
            return True
    except (urllib.error.URLError, OSError):
        return False
