"""A server that starts again with other settings, and keeps its layers.

It reads a line of JSON with the settings from stdin, serves until SIGTERM, prints the exit code, and reads
the next line. Layers of the same settings are made once, because weights take long.
"""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.lib.processes import Program, free_port, wait_ready


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
        print(serve(settings, partial(load, make_layers=lambda _: make_layer)), flush=True)


class Server(Program):
    """The process, for the program that started it."""

    def __init__(self) -> None:
        super().__init__("benchmarks.serving.lanes_server")

    @contextmanager
    def running(self, settings: dict[str, Any]) -> Iterator[str]:
        """The URL of a ready server with these settings."""
        port = free_port()
        self.write({**settings, "port": port})
        wait_ready(port, self.process)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            self.process.send_signal(signal.SIGTERM)
            if code := self.read():
                raise RuntimeError(f"exit code of the server: expected 0, got {code}")


if __name__ == "__main__":
    main()
