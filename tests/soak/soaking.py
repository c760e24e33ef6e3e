"""A soak from its start to its result."""

import os
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations, count
from pathlib import Path
from typing import Any

import httpx
import torch

from expertd.backends import BACKENDS
from expertd.service.settings.model import Settings
from tests.service.keys import bearer, write_keys
from tests.soak import callers, hostile, hostile_grpc, sockets
from tests.soak.plan import Plan
from tests.soak.reference import samples
from tests.soak.server import COMING, RIGHTS, SoakServer, several, soak_settings, stop, with_lanes
from tests.soak.tally import FORKSERVER, OUTCOMES, Phase, Stage, Tally

Caller = Callable[[Plan, Tally], None]
CALLERS: dict[str, Caller] = {
    "HTTP": callers.over_http,
    "shared memory": sockets.in_regions,
    "channel": callers.through_channels,
    "gRPC": callers.over_grpc,
    "JSON": sockets.in_json,
    "a key that changes": callers.with_a_changing_key,
    "a model that changes": callers.of_a_changing_model,
    "wrong requests": hostile.wrong,
    "wrong messages": hostile_grpc.wrong_messages,
    "slow requests": sockets.slow,
    "wrong lines": hostile.wrong_lines,
}
MUST_BE_RIGHT = set(CALLERS) - {"wrong requests", "wrong messages", "wrong lines"}
WARM_UP = 0.4  # of the time of the first server, before its memory is compared
_SAMPLE_SECONDS = 0.5
_AFTER_SECONDS = 3.0  # that the callers go on after a restart, at least


class Soak:
    """Callers of every kind beside each other; the server is changed, ended and started again under them.

    devices  the GPUs of the ranks of the second server; None: on a GPU it has one rank
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        requests: int,
        idle: int,
        slots: int,
        pause: float,
        kinds: Iterable[str],
        backend: str = "cpu",
        devices: str | None = None,
    ) -> None:
        self._began = time.perf_counter()
        self._seconds, self._requests, self._num_idle = seconds, requests, idle
        self._settings = settings = soak_settings(folder, backend=backend)
        self._is_on_gpu = BACKENDS[backend].on_gpu
        self._several = several(settings, devices)
        self._server = SoakServer(settings.port, folder)
        self._keys = folder / "keys.yaml"
        self._stage = Stage()
        self._tallies = {kind: Tally(kind) for kind in kinds}
        assert settings.grpc.port is not None
        self._plan = Plan(
            folder, settings.port, settings.grpc.port, samples(settings), self._stage, slots, pause
        )
        self._idle: list[socket.socket] = []
        self._memory: list[tuple[int, int, int]] = []  # bytes, descriptors, and bytes of the GPU
        self._done: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        """The result."""
        self._server.start(self._settings)
        self._say("the server is ready")
        with self._callers():
            self._open_idle()
            self._serve()
            codes = [self._restart(Phase.STOPPING, self._several)]
            self._lose_processes()
            self._restart(Phase.KILLED, with_lanes(self._settings))
        codes.append(self._server.terminate())
        return self._result(time.perf_counter() - self._began, codes)

    @contextmanager
    def _callers(self) -> Iterator[None]:
        processes = [
            FORKSERVER.Process(target=CALLERS[kind], args=(self._plan, tally), name=kind, daemon=True)
            for kind, tally in self._tallies.items()
        ]
        for process in processes:
            process.start()
        try:
            yield
        finally:
            self._stage.finish()
            for process in processes:
                process.join(60)
            self._codes = {process.name: process.exitcode for process in processes if process.exitcode}

    def _serve(self) -> None:
        """Change keys, models and partitions until the time is over and enough requests are sent."""
        began = time.perf_counter()
        for turn in count():
            if time.perf_counter() - began >= self._seconds and self._sent() >= self._requests:
                return
            server = self._server
            gpu = server.device_memory() if self._is_on_gpu else 0
            self._memory.append((server.memory(), server.descriptors(), gpu))
            self._change(turn)
            time.sleep(_SAMPLE_SECONDS)

    def _change(self, turn: int) -> None:
        """The keys, the models or the partitions; an idle connection is used."""
        match turn % 6:
            case 0:
                write_keys(self._keys, **RIGHTS, changing=["infer"])
            case 3:
                write_keys(self._keys, **RIGHTS)
            case 1 | 4 as place:
                what = "unload" if place == 1 else "load"
                self._ask("POST", f"/v2/repository/models/{COMING}/{what}", {})
            case 5:
                self._partition(turn)
        if self._idle:
            self._use([random.choice(self._idle)])

    def _partition(self, turn: int) -> None:
        """Change the partitions of a GPU; a CPU has none, and refuses."""
        sizes = {"one": 16 + 8 * (turn % 5)} if turn % 12 == 5 else {}
        self._ask("PUT", "/v1/partitions", {"partitions": sizes}, 200 if self._is_on_gpu else 409)

    def _ask(self, method: str, path: str, body: object, status: int = 200) -> None:
        """A call of an administrator."""
        answer = httpx.request(
            method, f"{self._plan.url}{path}", json=body, headers=bearer("admin"), timeout=60
        )
        assert answer.status_code == status, answer.text
        self._done[path] += 1

    def _lose_processes(self) -> None:
        """Kill a rank, whose requests are refused, and an HTTP process, whose connections end."""
        if self._several.num_ranks > 1:
            self._server.kill_child("ranks.process", "the ranks are ready again")
            self._done["ranks lost"] += 1
        time.sleep(_AFTER_SECONDS)
        self._stage.phase = Phase.KILLED
        time.sleep(0.1)
        self._server.kill_child("http.worker", "starting another")
        self._done["HTTP processes lost"] += 1
        self._stage.phase = Phase.SERVING
        time.sleep(_AFTER_SECONDS)

    def _open_idle(self) -> None:
        """All at once: one after another, each would wait while the server is busy with the callers."""
        address = "127.0.0.1", self._plan.port
        self._idle = [socket.create_connection(address, timeout=30) for _ in range(self._num_idle)]
        self._use(self._idle)

    def _use(self, socks: Sequence[socket.socket]) -> None:
        for sock in socks:
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        for sock in socks:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")

    def _restart(self, phase: Phase, settings: Settings) -> int:
        """End the server under its callers, and start another one; the exit code, 0 after SIGKILL."""
        code = 0
        if phase is Phase.STOPPING:
            code = stop(self._server, self._stage)
        else:
            self._stage.phase = phase
            time.sleep(0.1)
            self._server.kill()
        for sock in self._idle:
            with suppress(OSError):
                sock.close()
        self._idle.clear()
        (self._plan.folder / "channels").unlink(missing_ok=True)
        self._say("the server has ended")
        self._server.start(settings)
        self._say("the next one is ready")
        self._stage.phase = Phase.SERVING
        time.sleep(max(_AFTER_SECONDS, 0.05 * self._seconds))
        return code

    def _say(self, what: str) -> None:
        seconds = time.perf_counter() - self._began
        print(f"soak: {seconds:.0f} s: {what}, {self._sent()} requests sent", file=sys.stderr, flush=True)

    def _sent(self) -> int:
        return sum(tally.counts()["sent"] for tally in self._tallies.values())

    def _result(self, seconds: float, codes: list[int]) -> dict[str, Any]:
        kinds = {kind: tally.counts() for kind, tally in self._tallies.items()}
        total = {outcome: sum(counts[outcome] for counts in kinds.values()) for outcome in OUTCOMES}
        warm = self._memory[int(WARM_UP * len(self._memory)) :]
        growth = [growth_of([each[index] for each in warm]) for index in range(3)]
        return {
            "header": header(seconds),
            "total": total,
            "unaccounted": 2 * total["sent"] - sum(total.values()),
            "kinds": {
                kind: {
                    **counts,
                    "p99_ms": self._tallies[kind].percentile_ms(0.99) if counts["right"] else None,
                }
                for kind, counts in kinds.items()
            },
            "memory": {
                "bytes": self._memory[-1][0],
                "growth": round(growth[0], 4),
                "mib_by_time": [
                    round(each[0] / 2**20, 1) for each in self._memory[:: len(self._memory) // 40 + 1]
                ],
            },
            "descriptors": {"count": self._memory[-1][1], "growth": round(growth[1], 4)},
            "device_memory": {"bytes": self._memory[-1][2], "growth": round(growth[2], 4)},
            "done": dict(self._done),
            "idle_connections": self._num_idle,
            "exit_codes": codes,
            "callers_ended_with": self._codes,
            "mistakes": self._server.mistakes(),
        }


def growth_of(values: Sequence[int]) -> float:
    """The largest rise from one sixth to a later one, of their medians: a fall in between hides nothing."""
    size = max(1, len(values) // 6)
    medians = [
        statistics.median(values[start : start + size])
        for start in range(0, size * (len(values) // size), size)
    ]
    return max((late / early - 1 for early, late in combinations(medians, 2) if early), default=0.0)


def header(seconds: float) -> dict[str, Any]:
    """What a result says of the machine, the versions and its length."""
    return {
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
    }


def commit() -> str | None:
    """The commit of this folder; None without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_name() -> str:
    """The machine's, as Linux gives it."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()


def mistakes(result: dict[str, Any], growth: float) -> list[str]:
    """What a result has that it must not have; memory and descriptors may grow by this part."""
    total = result["total"]
    found = [f"{name}: expected 0, got {total[name]}" for name in ("lost", "wrong", "failed") if total[name]]
    if result["unaccounted"]:
        found.append(f"requests without an outcome: expected 0, got {result['unaccounted']}")
    found += [
        f"growth of {name}: expected at most {growth:.0%}, got {result[name]['growth']:.1%}"
        for name in ("memory", "descriptors", "device_memory")
        if result[name]["growth"] > growth
    ]
    found += [f"exit code: expected 0, got {code}" for code in result["exit_codes"] if code]
    found += [
        f"{kind}: expected callers without errors, got exit code {code}"
        for kind, code in result["callers_ended_with"].items()
    ]
    found += [f"log: expected no such line, got {line}" for line in result["mistakes"]]
    found += [
        f"{kind}: expected right answers, got none"
        for kind in MUST_BE_RIGHT
        if kind in result["kinds"] and not result["kinds"][kind]["right"]
    ]
    return found
