"""Serves one request with an installed server, or fails: `python try_serve.py CONFIG`.

The image's build runs it, also for the bytecode of the modules that it imports: others are installed without.
Uses only the standard library.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

_SECONDS = 120


def try_serve(python: Path, config: Path) -> None:
    """Start `expertd serve` beside `python`, send a request, and end it. Raises RuntimeError if any fails."""
    with tempfile.TemporaryFile() as log:
        expertd = str(python.with_name("expertd"))
        command = [expertd, "serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0"]
        server = subprocess.Popen(command, stderr=log, env=environment())
        try:
            port = _port_when_ready(server, log.fileno())
            _infer(port)
            server.send_signal(signal.SIGTERM)
            if (code := server.wait(_SECONDS)) != 0:
                raise RuntimeError(f"exit code: expected 0 after SIGTERM, got {code}: {_text(log.fileno())}")
        finally:
            server.kill()
            server.wait()


def environment() -> dict[str, str]:
    """This process's, without variables that change what Python imports or writes, and without settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EXPERTD_"))}


def _port_when_ready(server: "subprocess.Popen[bytes]", log: int) -> int:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and server.poll() is None:
        text = _text(log)
        listening = re.search(r"listening on http://127\.0\.0\.1:(\d+)", text)
        if listening and " ready: " in text:
            return int(listening[1])
        time.sleep(0.1)
    raise RuntimeError(f"server: expected it to be ready within {_SECONDS} s, got: {_text(log)}")


def _infer(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)) as server:
        model = _call(server, "POST", "/v2/repository/index", "{}")[0]["name"]
        (hidden_states, *_) = _call(server, "GET", f"/v2/models/{model}")["inputs"]
        size = hidden_states["shape"][-1]
        tensor = {"name": hidden_states["name"], "datatype": "FP32", "shape": [1, size], "data": [0.5] * size}
        answer = _call(server, "POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
    if (shape := answer["outputs"][0]["shape"]) != [1, size]:
        raise RuntimeError(f"output: expected the shape [1, {size}], got {shape}")


def _call(server: http.client.HTTPConnection, method: str, path: str, body: str | None = None) -> Any:
    server.request(method, path, body, {"Content-Type": "application/json"})
    response = server.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"{method} {path}: expected 200, got {response.status}: {content[:300]!r}")
    return json.loads(content)


def _text(log: int) -> str:
    return Path(f"/proc/self/fd/{log}").read_text(errors="replace")


if __name__ == "__main__":
    try_serve(Path(sys.executable), Path(sys.argv[1]))
