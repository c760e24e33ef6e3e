"""Callers over NIXL that are killed under one server: `python -m tests.soak.nixl`; 1 if anything was left.

Several callers at a time compare every output with the layer's in float64. After some answers, in the middle
of its next calls, each is killed with SIGKILL, in every second case together with its end of the channel, as
if its machine had gone. After every `--every` kills all callers have gone. The server must then have no
channels, no processes (each of which had an agent of NIXL), no more open files than before the first caller,
no more threads but those of asyncio's executor, and, after the first quarter of the kills, memory that has
grown by `--growth` at most.

--json  has what the server held after every such number of kills
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from ctypes import c_uint64
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx

from expertd_client import ExpertClient
from tests.service.apps import MODEL, tiny_settings
from tests.service.children import children_of
from tests.service.sockets import free_port
from tests.service.waiting import wait_for
from tests.soak.reference import Sample, samples
from tests.soak.server import SoakServer
from tests.soak.soaking import header

NAME = str(MODEL["name"])
SIZES = {1: 1, 16: 1, 64: 1}  # tokens; 64 are more than go in a message
MOST_ANSWERS = 30  # of a caller
MOST_SECONDS = 0.01  # from the last of them to its end
SECONDS = 120.0  # for a caller to start, or all to be gone
END = "expertd_client.nixl"
GONE = "channels", "agents", "descriptors"
EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)  # of asyncio
# Python runs it at the start of the server: all threads of an executor start with its first work, and take
# turns. Else one starts whenever more runs at a time than ever before, perhaps with the last callers, and has
# 1.7% of the memory from then on.
_ALL_THREADS = """
from concurrent.futures import ThreadPoolExecutor

start_one = ThreadPoolExecutor._adjust_thread_count


def start_all(executor):
    if not executor._threads:
        while len(executor._threads) < executor._max_workers:
            start_one(executor)


ThreadPoolExecutor._adjust_thread_count = start_all
"""
_PROCESSES = multiprocessing.get_context("forkserver")


def call(url: str, every: Sequence[Sample], seed: int, right: c_uint64, wrong: c_uint64) -> None:
    """Be a caller until it is killed."""
    chance = random.Random(seed)
    with ExpertClient(url, transport="nixl", timeout=SECONDS) as client:
        sample = every[-1]  # with the most tokens, so that the channel needs not grow
        while True:
            is_right = sample.is_right(client.infer(NAME, *sample.arguments))
            (right if is_right else wrong).value += 1
            sample = chance.choice(every)


class Callers:
    """Those that run at a time; the count of their kills."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._chance, self._lock = url, random.Random(seed), threading.Lock()
        self._samples = samples(tiny_settings(), 1, SIZES)
        self.counts: Counter[str] = Counter(callers=0, with_ends=0, answers=0, wrong=0)
        self.errors: list[str] = []

    def kill(self, kills: int, at_a_time: int) -> None:
        """Have as many callers start, call and be killed."""
        left = iter([self._chance.randrange(2**32) for _ in range(kills)])
        threads = [threading.Thread(target=self._one_by_one, args=(left,)) for _ in range(at_a_time)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one_by_one(self, seeds: Iterator[int]) -> None:
        while True:
            with self._lock:
                seed = next(seeds, None)
            if seed is None:
                return
            try:
                self._one(seed)
            except Exception as error:
                with self._lock:
                    self.errors.append(f"{type(error).__name__}: {error}"[:300])

    def _one(self, seed: int) -> None:
        chance = random.Random(seed)
        right, wrong = (multiprocessing.RawValue(c_uint64) for _ in range(2))  # a lock could die with it
        process = _PROCESSES.Process(target=call, args=(self._url, self._samples, seed, right, wrong))
        process.start()
        try:
            answers = chance.randint(1, MOST_ANSWERS)
            has_called = partial(_has_called, process, right, wrong, answers)
            wait_for(has_called, f"a caller has {answers} answers", SECONDS)
            ends = children_of(process.pid, END)
            time.sleep(chance.uniform(0, MOST_SECONDS))
        finally:
            process.kill()
        both = chance.random() < 0.5
        if both:
            for end in ends:
                with suppress(ProcessLookupError):  # it has seen that its caller has gone
                    os.kill(end, signal.SIGKILL)
        process.join()
        with self._lock:
            self.counts.update(callers=1, with_ends=int(both), answers=right.value, wrong=wrong.value)


def _has_called(process: ForkServerProcess, right: c_uint64, wrong: c_uint64, answers: int) -> bool:
    if process.exitcode is not None:
        raise RuntimeError(f"a caller: expected it to call, got exit code {process.exitcode}")
    return right.value + wrong.value >= answers


class Watch:
    """What a server has while nobody calls."""

    def __init__(self, server: SoakServer) -> None:
        self._server = server
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=SECONDS, verify=False)
        self.before = self._look()

    def look(self) -> dict[str, int]:
        """Once all is gone that came after `before`, or time is over."""
        with suppress(TimeoutError):
            wait_for(self._is_as_before, "the server has what it had before", SECONDS)
        return self._look()

    def close(self) -> None:
        self._http.close()

    def _is_as_before(self) -> bool:
        return all(self._look()[name] <= self.before[name] for name in GONE)

    def _look(self) -> dict[str, int]:
        return {
            "channels": len(self._http.get("/v1/channels").json()["channels"]),
            "agents": len(self._server.children(END)),
            "descriptors": self._server.descriptors(),
            "threads": self._server.threads(),
            "memory": self._server.memory(),
        }


def soak(folder: Path, kills: int, every: int, at_a_time: int, seed: int) -> dict[str, Any]:
    """The result."""
    # As between machines without RDMA; and the callers need the cores, too.
    os.environ |= {"UCX_TLS": "tcp", "OMP_NUM_THREADS": "1"}
    (folder / "sitecustomize.py").write_text(_ALL_THREADS)
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    server = SoakServer(free_port(), folder, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    server.start(tiny_settings(host="127.0.0.1", port=server.port, channels={"nixl": True, "socket": None}))
    try:
        with closing(Watch(server)) as watch:
            callers = Callers(f"http://127.0.0.1:{server.port}", seed)
            looks = [{"kills": 0, **watch.before}]
            for done in range(0, kills, every):
                callers.kill(min(every, kills - done), at_a_time)
                looks.append({"kills": min(done + every, kills), **watch.look()})
                print(f"soak: {looks[-1]}, {dict(callers.counts)}", flush=True)
        code = server.terminate()
        errors = [*callers.errors, *server.mistakes()]
    except BaseException:
        server.kill()
        raise
    return {**callers.counts, "looks": looks, "exit_code": code, "errors": errors}


def mistakes(result: dict[str, Any], growth: float) -> list[str]:
    """What must not be."""
    found: list[str] = [
        f"{name}: expected 0, got {result[name]}" for name in ("wrong", "exit_code") if result[name]
    ]
    looks = result["looks"]
    before, warm, last = looks[0], looks[max(1, len(looks) // 4)], looks[-1]
    most = {name: before[name] for name in GONE}
    most |= {"threads": before["threads"] + EXECUTOR_THREADS, "memory": int((1 + growth) * warm["memory"])}
    found += [
        f"{name}: expected at most {limit}, got {last[name]}"
        for name, limit in most.items()
        if last[name] > limit
    ]
    return [*found, *result["errors"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.nixl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--callers", type=int, default=3, help="at a time")
    parser.add_argument("--growth", type=float, default=0.02, help="of memory")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    _PROCESSES.set_forkserver_preload(["tests.soak.reference", "expertd_client"])
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = soak(Path(folder), given.kills, given.every, given.callers, given.seed)
    about = header(time.monotonic() - began) | {"at_a_time": given.callers, "seed": given.seed}
    text = json.dumps({"header": about, **result}, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    wrong = mistakes(result, given.growth)
    for each in wrong:
        print(f"soak: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
