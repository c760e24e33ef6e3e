"""Goodput under a deadline, by offered load: `python -m benchmarks open_loop [--json FILE]`.

The demo layer, served on this machine with one thread for its GEMMs, answers requests of mixed sizes through
one channel. Capacity is what a closed loop gets. Then requests arrive at random (Poisson), at several parts
of it, whether or not earlier ones are answered. Each has a deadline, which the server has as its `timeout`.
Times count from when a request should have been sent, so a sender that is late makes an answer late, too.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib import cpus
from benchmarks.lib.processes import demo_server
from benchmarks.lib.run import Result, new_parser
from expertd_client import AsyncChannel, AsyncExpertClient, DeadlineError, ServerBusyError

LOADS = (0.5, 0.9, 1.1, 2.0)
TOKENS = (16, 64, 256, 1024)
SHARES = (0.4, 0.3, 0.2, 0.1)  # of the sizes
MAX_TOKENS = max(TOKENS)
NUM_SLOTS = 128  # requests in flight
CLOSED = 64  # callers of the closed loop


_TIMES = ("seconds", "sent", "server")  # of a late request


class Outcome(NamedTuple):
    """One request: what became of it, and when, in seconds after it was due."""

    kind: str  # output, refused, late
    seconds: float
    sent: float  # after it was due; the rest of its time is the server's, and the caller's until it looks
    server: float  # in the queue and the step; 0 without an output


class Load:
    """Sends requests through one channel."""

    def __init__(self, channel: AsyncChannel, seed: int) -> None:
        self._channel = channel
        self._random = np.random.default_rng(seed)
        self._free = asyncio.Queue[Any]()
        for slot in channel.slots:
            slot.hidden_states[:] = self._random.standard_normal(slot.hidden_states.shape)
            self._free.put_nowait(slot)

    async def closed(self, seconds: float) -> float:
        """Requests a second of callers that send the next one when they have an answer."""
        end, answered = time.perf_counter() + seconds, 0

        async def caller() -> None:
            nonlocal answered
            slot = await self._free.get()
            while time.perf_counter() < end:
                await self._channel.infer(slot, self._size())
                answered += 1
            self._free.put_nowait(slot)

        await asyncio.gather(*(caller() for _ in range(CLOSED)))
        return answered / seconds

    async def open(self, rate: float, deadline: float, seconds: float) -> list[Outcome]:
        """The outcomes of all requests that were due in `seconds`."""
        gaps = self._random.exponential(1 / rate, int(2 * rate * seconds) + 100)
        due = [at for at in np.cumsum(gaps).tolist() if at < seconds]
        found: list[Outcome] = []
        tasks: set[asyncio.Task[None]] = set()
        began = time.perf_counter()
        for at in due:
            if (left := began + at - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            tasks.add(task := asyncio.create_task(self._one(began + at, deadline, found)))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return found

    async def _one(self, due: float, deadline: float, found: list[Outcome]) -> None:
        slot = await self._free.get()
        kind, server = "output", 0.0
        sent = time.perf_counter() - due
        try:
            ticket = await self._channel.submit(
                slot, self._size(), timeout=max(1e-3, round(deadline - sent, 3))
            )
            await self._channel.wait(ticket)
            server = ticket.queue_seconds + ticket.compute_seconds
        except ServerBusyError:
            kind = "refused"
        except DeadlineError:
            kind = "late"
        found.append(Outcome(kind, time.perf_counter() - due, sent, server))
        while (ticket := slot.ticket) is not None and not self._channel.is_answered(ticket):
            await asyncio.sleep(1e-3)
        self._free.put_nowait(slot)

    def _size(self) -> int:
        return int(self._random.choice(TOKENS, p=SHARES))


def summary(
    load: float, rate: float, seconds: float, deadline: float, found: list[Outcome]
) -> dict[str, Any]:
    """One row."""
    late = [each for each in found if each.kind == "late" or each.seconds > deadline]
    good = [each.seconds for each in found if each.kind == "output" and each.seconds <= deadline]
    refused = [each.seconds for each in found if each.kind == "refused" and each.seconds <= deadline]
    return {
        "load": load,
        "offered": rate,
        "sent": len(found),
        "goodput": len(good) / seconds,
        "p50_ms": _ms(good, 50),
        "p99_ms": _ms(good, 99),
        "refused": len(refused),
        "refused_p50_ms": _ms(refused, 50),
        "refused_p99_ms": _ms(refused, 99),
        "late": len(late),
        "late_by_p50_ms": _ms([each.seconds - deadline for each in late], 50),
        "late_by_most_ms": _ms([each.seconds - deadline for each in late], 100),
        "late_requests": [
            {"kind": each.kind, **{f"{name}_ms": 1e3 * getattr(each, name) for name in _TIMES}}
            for each in late
        ],
    }


async def measure(port: int, deadline: float, seconds: float, result: Result) -> float:
    """All rows, and the capacity, which is returned."""
    async with (
        AsyncExpertClient(f"http://127.0.0.1:{port}") as client,
        await client.open_channel(
            "demo", max_tokens=MAX_TOKENS, num_slots=NUM_SLOTS, datatype="BF16"
        ) as channel,
    ):
        load = Load(channel, 0)
        await load.closed(1.0)
        capacity = await load.closed(seconds)
        print(f"capacity: {capacity:.0f} requests/s", flush=True)
        for part in LOADS:
            rate = part * capacity
            found = await load.open(rate, deadline, seconds)
            result.put(summary(part, rate, seconds, deadline, found))
    return capacity


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each load."""
    parser = new_parser(__doc__)
    parser.add_argument("--deadline", type=float, default=100.0, help="milliseconds")
    parser.add_argument("--seconds", type=float, default=20.0)
    cpus.add_option(parser)
    given = parser.parse_args(arguments)
    of_server, header = cpus.split(given.server_cpus)
    os.environ["OMP_NUM_THREADS"] = "1"
    header |= {"tokens": TOKENS, "shares": SHARES, "deadline_ms": given.deadline, "seconds": given.seconds}
    result = Result(given.json, header)
    with (
        tempfile.TemporaryDirectory() as folder,
        demo_server(f"channels.socket={folder}/channels", cpus=of_server) as (port, _),
    ):
        result.write(capacity=asyncio.run(measure(port, given.deadline / 1e3, given.seconds, result)))
    return 0


def _ms(seconds: list[float], percentile: float) -> float:
    return round(1e3 * float(np.percentile(seconds or [0.0], percentile)), 2)
