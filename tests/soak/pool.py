"""A soak of a pool of four CPU servers: `python -m tests.soak.pool [--seconds S]`; 1 if anything was wrong.

They are two replicas of each half of a layer's experts. Callers of both transports, in threads and in an
event loop, compare every output with the whole layer's in float64. Every `--every` seconds a server is
killed, stopped for a while or drained, in turn, and is back before the next.

lost   calls that raised an error
wrong  outputs that differ by more than rounding
late   calls that took longer than `--late` seconds
p50    ms of a call, and p99: while all servers are there (calm), and from an event until its server is
       back, of each kind of event
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd_client import AsyncExpertClient, ExpertClient
from expertd_client.transport import TransportName
from tests.service.apps import MODEL, NUM_EXPERTS, tiny_settings
from tests.service.waiting import wait_for
from tests.soak.reference import Sample, samples
from tests.soak.server import SoakServer, free_port
from tests.soak.soaking import header

NAME = str(MODEL["name"])
EVENTS = "kill", "stop", "drain"
TRANSPORTS: tuple[TransportName, ...] = ("channel", "http")
FAILOVER_SECONDS = 1.0
STOPPED_SECONDS = 3.0
SIZES = {1: 4, 5: 2, 16: 1}
_HALF = NUM_EXPERTS // 2
_PARTS = f"0-{_HALF - 1}", f"{_HALF}-{NUM_EXPERTS - 1}"


class PoolSoak:
    """From the start of the servers to their end."""

    def __init__(self, folder: Path, seconds: float, every: float, late: float, seed: int) -> None:
        self._folder, self._seconds, self._every, self._late = folder, seconds, every, late
        self._chance = random.Random(seed)
        self._samples = samples(tiny_settings({}), sizes=SIZES)
        self._servers: list[tuple[SoakServer, Any]] = []
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._errors: list[str] = []
        self._times: dict[str, list[float]] = {when: [] for when in ("calm", *EVENTS)}  # of calls, in seconds
        self._when = "calm"
        self._is_over = False
        self._events: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        """The result."""
        for number, part in enumerate(_PARTS * 2):
            own = self._folder / str(number)
            own.mkdir()
            server = SoakServer(free_port(), own)
            channels = {"socket": str(own / "channels")}
            models = [{**MODEL, "local_experts": part}]
            settings = tiny_settings({}, models=models, host="127.0.0.1", port=server.port, channels=channels)
            server.start(settings)
            self._servers.append((server, settings))
        urls = [f"http://127.0.0.1:{server.port}" for server, _ in self._servers]
        options: dict[str, Any] = {"failover_seconds": FAILOVER_SECONDS, "timeout": 30.0}
        clients = [ExpertClient(urls, transport=name, **options) for name in TRANSPORTS]
        kinds: list[Callable[[], object]] = [partial(self._call, client) for client in 2 * clients]
        kinds.append(lambda: asyncio.run(self._call_in_loop(urls, options)))
        threads = [threading.Thread(target=kind) for kind in kinds]
        try:
            for thread in threads:
                thread.start()
            self._disturb(clients)
        finally:
            self._is_over = True
            for thread in threads:
                thread.join()
            for client in clients:
                client.close()
            for server, _ in self._servers:
                server.kill()
        return self.result()

    def result(self) -> dict[str, Any]:
        """Counts, and times in ms."""
        return {
            "calls": self._counts["calls"],
            "lost": self._counts["lost"],
            "wrong": self._counts["wrong"],
            "late": self._counts["late"],
            "events": dict(self._events),
            "times": {when: _percentiles(seconds) for when, seconds in self._times.items()},
            "errors": self._errors,
        }

    def _disturb(self, clients: Sequence[ExpertClient]) -> None:
        """Have one server after the other go, in all ways."""
        end = time.monotonic() + self._seconds
        while time.monotonic() + self._every < end or sum(self._events.values()) < len(EVENTS):
            began = time.monotonic()
            event = EVENTS[sum(self._events.values()) % len(EVENTS)]
            server, settings = self._chance.choice(self._servers)
            url = f"http://127.0.0.1:{server.port}"
            self._pause(self._chance.uniform(0.3, 0.5) * self._every)
            self._when = event
            if event == "kill":
                server.kill()
                server.start(settings)
            elif event == "stop":
                server.signal(signal.SIGSTOP)
                time.sleep(STOPPED_SECONDS)
                server.signal(signal.SIGCONT)
            elif code := server.terminate():
                raise RuntimeError(f"drain: expected exit code 0, got {code}")
            else:
                server.start(settings)
            for client in clients:
                wait_for(partial(_is_up, client, url), f"{url} is back")
            self._when = "calm"
            self._events[event] += 1
            self._pause(began + self._every - time.monotonic())
            made = (
                f"{self._counts['calls']:,} calls, {self._counts['lost']} lost, {self._counts['wrong']} wrong"
            )
            print(f"soak: {event} of {url}: {made}", flush=True)

    def _pause(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def _call(self, client: ExpertClient) -> None:
        while not self._is_over:
            sample = self._chosen()
            self._ends(time.monotonic(), sample, partial(client.infer, NAME, *sample.arguments))

    async def _call_in_loop(self, urls: Sequence[str], options: dict[str, Any]) -> None:
        async with AsyncExpertClient(urls, **options) as client:
            while not self._is_over:
                sample, began = self._chosen(), time.monotonic()
                try:
                    output = await client.infer(NAME, *sample.arguments)
                except Exception as error:
                    self._lost(error)
                else:
                    self._count(began, sample, output)

    def _chosen(self) -> Sample:
        return random.choices(self._samples, [sample.share for sample in self._samples])[0]

    def _ends(self, began: float, sample: Sample, infer: Any) -> None:
        try:
            output = infer()
        except Exception as error:
            self._lost(error)
        else:
            self._count(began, sample, output)

    def _lost(self, error: Exception) -> None:
        with self._lock:
            self._counts.update(calls=1, lost=1)
            self._errors.append(f"{type(error).__name__}: {error}"[:300])
        time.sleep(0.1)

    def _count(self, began: float, sample: Sample, output: npt.NDArray[Any]) -> None:
        seconds = time.monotonic() - began
        with self._lock:
            is_wrong, is_late = not sample.is_right(output), seconds > self._late
            self._counts.update(calls=1, wrong=int(is_wrong), late=int(is_late))
            self._times[self._when].append(seconds)


def _is_up(client: ExpertClient, url: str) -> bool:
    return any(server.url == url and server.state == "up" for server in client.servers())


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"calls": len(seconds), "p50_ms": round(1e3 * p50, 2), "p99_ms": round(1e3 * p99, 2)}


def mistakes(result: dict[str, Any], is_quiet: bool = True) -> list[str]:
    """What must not be; where others use the machine, calls may be late."""
    found = [f"{name}: expected 0, got {result[name]}" for name in ("lost", "wrong") if result[name]]
    if set(result["events"]) != set(EVENTS):
        found.append(f"events: expected each of {', '.join(EVENTS)}, got {result['events']}")
    if not is_quiet:
        return found
    if result["late"] > 1e-3 * result["calls"]:
        found.append(f"late: expected at most 0.1 % of {result['calls']}, got {result['late']}")
    calm = result["times"]["calm"]["p99_ms"]
    for event in EVENTS:
        p99 = result["times"][event].get("p99_ms", 0.0)
        if p99 > 3 * calm:
            found.append(f"p99: expected at most 3 times {calm} ms during {event}, got {p99}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.pool", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two events")
    parser.add_argument("--late", type=float, default=2 * FAILOVER_SECONDS, help="seconds of a call")
    parser.add_argument("--busy", action="store_true", help="others use the machine: ignore times")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = PoolSoak(Path(folder), given.seconds, given.every, given.late, given.seed).run()
    about = header(time.monotonic() - began) | {
        name: getattr(given, name) for name in ("every", "late", "seed")
    }
    text = json.dumps({"header": about, **result}, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    wrong = mistakes(result, not given.busy)
    for each in wrong:
        print(f"soak: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
