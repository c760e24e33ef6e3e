"""A server that starts again with other settings, and keeps its layers.

It reads a line of JSON with the settings from stdin, serves until SIGTERM, prints the exit code, and reads
the next line. Layers of the same settings are made once, because weights take long.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

START_SECONDS = 300.0


def main() -> None:
    """Serve until stdin ends."""
    import torch

    from expertd.kernels import Backend
    from expertd.service.engine.layers import Cancelled, layer_of
    from expertd.service.engine.loading import load
    from expertd.service.http.server import serve
    from expertd.service.moe.layer import MoELayer
    from expertd.service.settings.model import Settings
    from expertd.service.settings.served import ModelSettings

    layers: dict[str, MoELayer] = {}

    def make_layer(
        model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled
    ) -> MoELayer:
        key = model.model_dump_json()
        if key not in layers:
            layers.clear()  # there may be no memory for two
            layers[key] = layer_of(model, backend, device, cancelled)
        return layers[key]

    for line in sys.stdin:
        settings = Settings.model_validate(json.loads(line))
        print(serve(settings, partial(load, make_layer=make_layer)), flush=True)


class Server:
    """The process, for the program that started it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.serving.lanes_server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def running(self, settings: dict[str, Any]) -> Iterator[str]:
        """The URL of a ready server with these settings, of which `port` is one."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        url = f"http://127.0.0.1:{settings['port']}"
        self._wait_ready(url)
        try:
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            if (code := process.stdout.readline().strip()) != "0":
                raise RuntimeError(f"exit code of the server: expected 0, got {code or 'none'}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _wait_ready(self, url: str) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{url}/v2/health/ready").close()
                return
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError(f"the server ended with code {self._process.returncode}") from None
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


if __name__ == "__main__":
    main()
