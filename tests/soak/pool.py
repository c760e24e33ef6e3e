"""A soak of a pool of four CPU servers: `python -m tests.soak.pool [--seconds S]`; 1 if anything was wrong.

They are two replicas of each half of a layer's experts. Callers of both transports, in threads and in an
event loop, compare every output with the whole layer's in float64. Every `--every` seconds a server is
killed, stopped for a while or drained, in turn, and is back before the next.

lost   calls that raised an error
wrong  outputs that differ by more than rounding
late   calls that took longer than `--late` seconds
p50    ms of a call, p99 and max: while all servers are there (calm), and from an event until its server is
       back, of each kind of event
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from expertd_client import AsyncExpertClient, ExpertClient
from expertd_client.transport import TransportName
from tests.service.apps import MODEL, NUM_EXPERTS, tiny_settings
from tests.service.sockets import free_port
from tests.soak.events import FAILOVER_SECONDS, EventSoak, new_parser, reported
from tests.soak.reference import Sample, samples
from tests.soak.server import SoakServer

NAME = str(MODEL["name"])
TRANSPORTS: tuple[TransportName, ...] = ("channel", "http")
SIZES = {1: 4, 5: 2, 16: 1}
_HALF = NUM_EXPERTS // 2
_PARTS = f"0-{_HALF - 1}", f"{_HALF}-{NUM_EXPERTS - 1}"


class PoolSoak(EventSoak):
    """From the start of the servers to their end."""

    pause = 0.0
    """Seconds between the calls of a caller."""

    def run(self, folder: Path) -> dict[str, Any]:
        """The result."""
        self._samples = samples(tiny_settings({}), sizes=SIZES)
        for number, part in enumerate(_PARTS * 2):
            own = folder / str(number)
            own.mkdir()
            server = SoakServer(free_port(), own)
            channels = {"socket": str(own / "channels")}
            models = [{**MODEL, "local_experts": part}]
            settings = tiny_settings({}, models=models, host="127.0.0.1", port=server.port, channels=channels)
            server.start(settings)
            self.servers.append((server, settings))
        urls = [server.url for server, _ in self.servers]
        options: dict[str, Any] = {"failover_seconds": FAILOVER_SECONDS, "timeout": 30.0}
        clients = [ExpertClient(urls, transport=name, **options) for name in TRANSPORTS]
        kinds: list[Callable[[], object]] = [partial(self._call, client) for client in 2 * clients]
        kinds.append(lambda: asyncio.run(self._call_in_loop(urls, options)))
        try:
            self.run_callers(kinds, lambda url: all(_is_up(client, url) for client in clients))
        finally:
            for client in clients:
                client.close()
            for server, _ in self.servers:
                server.kill()
        return self.result()

    def _call(self, client: ExpertClient) -> None:
        while not self.is_over:
            sample = self._sample()
            self.call(partial(client.infer, NAME, *sample.arguments), sample.is_right)
            time.sleep(self.pause)

    async def _call_in_loop(self, urls: Sequence[str], options: dict[str, Any]) -> None:
        async with AsyncExpertClient(urls, **options) as client:
            while not self.is_over:
                sample, began = self._sample(), self.begin()
                try:
                    output = await client.infer(NAME, *sample.arguments)
                except Exception as error:
                    self.lost(error)
                    await asyncio.sleep(0.1)
                else:
                    self.count(began, sample.is_right(output))
                    await asyncio.sleep(self.pause)

    def _sample(self) -> Sample:
        return random.choices(self._samples, [sample.share for sample in self._samples])[0]


def _is_up(client: ExpertClient, url: str) -> bool:
    return any(server.url == url and server.state == "up" for server in client.servers())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result."""
    parser = new_parser("tests.soak.pool", __doc__)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between the calls of a caller")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        soak = PoolSoak(given.seconds, given.every, given.late, given.seed)
        soak.pause = given.pause
        return reported(given, partial(soak.run, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
