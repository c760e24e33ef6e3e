"""A soak of device calls, on two GPUs: `python -m tests.soak.device_calls`; 1 if anything was wrong.

A server on the first GPU has three small layers. Callers on the last one, all in this process, each have a
channel, a stream, and a CUDA graph for each of several numbers of tokens, with calls to all layers in two
slots. They replay their graphs at random. Every output is compared on the GPU with that of an HTTP request,
which has the same bits. At times, all calls have ended, and the server's metrics must have counted them.

--kills  times that the server is killed under its callers and started again, and before that another process
         that makes calls. Nothing may differ; such calls alone are not compared with the metrics
"""

import argparse
import faulthandler
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # before CUDA starts: a stream that waits must not hold up others in its queue
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from expertd_client import ExpertClient
from tests.service.channels.call_server import (
    CALLER,
    LAYERS,
    NAMES,
    H,
    Server,
    endless_caller,
    expected,
    inputs,
)
from tests.soak.soaking import commit

TOKENS = 1, 7, 64  # of the graphs
SLOTS = 2
ROUND = 12  # calls whose outputs are compared at once: to each layer in each slot twice
ROUNDS = 8  # of a graph
CALLS = ROUND * ROUNDS
POOL = 17  # inputs for each number of tokens; a prime, so that each call of a round comes to all of them
AHEAD = 3  # replays of a caller that have not ended
MAX_CALLERS = 32  # streams that torch has
WORD = 4  # bfloat16 values that are compared as one int64
TIMEOUT, RETRY_SECONDS = 200, 120  # of the clients
LEAST_SECONDS = 60
END_SECONDS = 20.0  # before the end of the time, in which everything is closed
KILL_SECONDS = 30.0  # that a kill takes, and the start of a server
MOMENT_SECONDS = 2.0  # at most, before each kill
LOOK_SECONDS, REPORT_SECONDS, IDLE_SECONDS = 0.05, 10.0, 5e-5


class Pool(NamedTuple):
    """Inputs of one number of tokens, and what they must give."""

    given: tuple[Tensor, Tensor, Tensor]  # [POOL, tokens, ...] each
    expected: Tensor  # bfloat16 [LAYERS * POOL, tokens, hidden_size]


def pool_of(client: ExpertClient, tokens: int) -> Pool:
    """Random inputs, and the outputs of requests."""
    every = [inputs(tokens) for _ in range(POOL)]
    x, ids, weights = (torch.stack(tensors) for tensors in zip(*every, strict=True))
    outs = [expected(client, name, given) for name in NAMES for given in every]
    pool = Pool((x, ids, weights), torch.stack(outs))
    if bool(pool.expected.isnan().any()):
        raise RuntimeError("outputs of requests: expected numbers, got NaN")
    return pool


class Round:
    """Calls of one number of tokens, two at a time, each with inputs of the pool that kernels choose.

    first       the layer of the first call
    mismatches  int64: the words of outputs that differ are added to it
    """

    def __init__(self, pool: Pool, first: int, mismatches: Tensor) -> None:
        self._pool, self._mismatches = pool, mismatches
        self._layers = [(first + call) % LAYERS for call in range(ROUND)]
        calls = torch.arange(ROUND, device=pool.expected.device)
        self._chosen, self._steps = calls % POOL, 1 + calls % (POOL - 1)
        self._bases = torch.tensor(self._layers, device=calls.device) * POOL
        self._rows = torch.empty_like(calls)
        self._given = [tensor.new_empty(ROUND, *tensor.shape[1:]) for tensor in pool.given]
        self._expected = pool.expected.new_empty(ROUND, *pool.expected.shape[1:])
        self._outs = torch.empty_like(self._expected)

    def enqueue(self, channel: Any) -> None:
        """On the current stream."""
        self._chosen.add_(self._steps).remainder_(POOL)
        torch.add(self._chosen, self._bases, out=self._rows)
        for source, target in zip(self._pool.given, self._given, strict=True):
            torch.index_select(source, 0, self._chosen, out=target)
        torch.index_select(self._pool.expected, 0, self._rows, out=self._expected)
        self._outs.fill_(torch.nan)
        for call in range(ROUND + SLOTS):
            if call >= SLOTS:
                channel.wait(self._outs[call - SLOTS], slot=call % SLOTS)
            if call < ROUND:
                x, ids, weights = (tensor[call] for tensor in self._given)
                channel.send(x, ids, weights, model=NAMES[self._layers[call]], slot=call % SLOTS)
        differ = self._outs.view(torch.int64) != self._expected.view(torch.int64)
        self._mismatches.add_(differ.sum())


class Caller:
    """A channel, and the graphs that make its calls.

    made     calls and tokens of what has ended
    replays  that have ended
    """

    def __init__(self, url: str, number: int) -> None:
        self.made: Counter[str] = Counter()
        self.replays = 0
        self._pending: deque[tuple[Any, int]] = deque()  # events at their ends, and tokens
        self._client = ExpertClient(url, timeout=TIMEOUT, retry_seconds=RETRY_SECONDS)
        self.channel = self._client.open_device_channel(
            NAMES, max_tokens=max(TOKENS), num_slots=SLOTS, device=str(CALLER)
        )
        self._stream = torch.cuda.Stream(CALLER)  # type: ignore[no-untyped-call]
        self._mismatches = torch.zeros((), dtype=torch.int64, device=CALLER)
        self._on_host = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._pools = {tokens: pool_of(self._client, tokens) for tokens in TOKENS}
        self._rounds = {tokens: Round(pool, number, self._mismatches) for tokens, pool in self._pools.items()}
        self._graphs = {tokens: self._captured(tokens) for tokens in TOKENS}

    @property
    def mismatches(self) -> int:
        """Words of outputs of ended replays that differ."""
        return int(self._on_host)

    @property
    def num_pending(self) -> int:
        """Replays that have not ended."""
        return len(self._pending)

    def prove(self) -> None:
        """See that nothing differs so far, and that all would if other outputs were expected."""
        for tokens, pool in self._pools.items():
            words = pool.expected.view(torch.int64)
            with torch.cuda.stream(self._stream):
                before = int(self._mismatches)
                words.bitwise_xor_(1)
                self._graphs[tokens].replay()
                words.bitwise_xor_(1)
                seen = int(self._mismatches)
                self._mismatches.zero_()
            self._count(tokens, CALLS)
            wanted = CALLS * tokens * H // WORD
            if (before, seen) != (0, wanted):
                text = f"expected 0 words to differ, then {wanted}, got {before} and {seen}"
                raise RuntimeError(f"outputs of {tokens} tokens: {text}")

    def replay(self, tokens: int) -> None:
        """Enqueue the calls of a graph."""
        with torch.cuda.stream(self._stream):
            self._graphs[tokens].replay()
            self._on_host.copy_(self._mismatches, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending.append((event, tokens))

    def collect(self) -> None:
        """Count the replays that have ended."""
        while self._pending and self._pending[0][0].query():
            self._count(self._pending.popleft()[1], CALLS)
            self.replays += 1

    def close(self) -> None:
        """After the last replay."""
        self.channel.check()
        self.channel.close()
        self._client.close()

    def _captured(self, tokens: int) -> Any:
        """The graph of a number of tokens. A round is computed before, for which all kernels are loaded."""
        torch.cuda.synchronize(CALLER)
        with torch.cuda.stream(self._stream):
            self._rounds[tokens].enqueue(self.channel)
        torch.cuda.synchronize(CALLER)
        self._count(tokens, ROUND)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(ROUNDS):
                self._rounds[tokens].enqueue(self.channel)
        return graph

    def _count(self, tokens: int, calls: int) -> None:
        self.made.update(calls=calls, tokens=calls * tokens)


class Counted(NamedTuple):
    """By the server, of one model."""

    calls: int
    tokens: int


NONE = dict.fromkeys(NAMES, Counted(0, 0))


def counted_in(metrics: str) -> dict[str, Counted]:
    """By the names of models, from the text of /metrics."""
    calls, tokens = "expertd_device_calls_total", "expertd_device_call_tokens_total"
    values = {
        (sample.name, sample.labels["model"]): int(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name in (calls, tokens)
    }
    return {name: Counted(values[calls, name], values[tokens, name]) for name in NAMES}


class Soak:
    """From the start of the server to its end.

    calls    to be made, unless the time is over before
    seconds  for everything
    """

    def __init__(self, folder: Path, calls: int, seconds: float, callers: int, kills: int, seed: int) -> None:
        self._folder, self._calls, self._num_callers, self._num_kills = folder, calls, callers, kills
        self._seed, self._chance = seed, random.Random(seed)
        self._about = {"commit": commit(), "gpu": torch.cuda.get_device_name(0)}
        self._began = time.monotonic()
        self._seconds = seconds
        self._callers: list[Caller] = []
        self._server: Server | None = None
        self._other: subprocess.Popen[str] | None = None
        self._reported = self._began
        self._kills = self._compared = 0
        # What the server had counted, and callers had made, when both were known last; None: by another one.
        self._base: tuple[dict[str, Counted], Counter[str]] | None = (NONE, Counter())
        self._moments: list[tuple[float, int]] = []  # when all calls had ended, and how many
        self.failure: str | None = None

    def run(self) -> None:
        """All of it. Raises what is wrong; calls may then be under way, for which nothing waits."""
        self._server = server = Server(self._folder)
        self._go_on(server.is_ready, "the server is ready")
        start_seconds = self._elapsed
        for number in range(self._num_callers):
            self._callers.append(Caller(server.url, number))
        for caller in self._callers:
            caller.prove()
        self._compare()
        for number in range(1, self._num_kills + 1):
            self._make(number / (self._num_kills + 1))
            if self._seconds - END_SECONDS - self._elapsed < start_seconds + KILL_SECONDS:
                print("soak: no time for another kill", flush=True)
                break
            self._kill(server)
            server = self._server
        self._make(1.0)
        self._compare()
        for caller in self._callers:
            caller.close()
        server.close()

    def end_processes(self) -> None:
        """Kill those that are left."""
        for process in (self._server and self._server.process, self._other):
            if process is not None:
                with process:  # closes its pipe, and waits
                    process.kill()

    def result(self) -> dict[str, Any]:
        """What has been done so far."""
        (begin, first), (end, last) = (self._moments or [(0.0, 0)])[0], (self._moments or [(0.0, 0)])[-1]
        return {
            **self._about,
            "asked": self._calls,
            "calls": self._made["calls"],
            "tokens": self._made["tokens"],
            "seconds": round(self._elapsed, 1),
            "calls_per_s": round((last - first) / (end - begin)) if end > begin else 0,
            "callers": len(self._callers),
            "mismatches": self._mismatches,
            "compared_with_metrics": self._compared,
            "kills": self._kills,
            "seed": self._seed,
            "failure": self.failure,
        }

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def _made(self) -> Counter[str]:
        return sum((caller.made for caller in self._callers), Counter())

    @property
    def _mismatches(self) -> int:
        return sum(caller.mismatches for caller in self._callers)

    def _make(self, part: float) -> None:
        """Go on until this part of the calls is made, or of the time is over."""

        def is_made() -> bool:
            late = self._elapsed / (self._seconds - END_SECONDS)
            return max(self._made["calls"] / self._calls, late) >= part

        self._go_on(is_made, "calls are made")

    def _kill(self, server: Server) -> None:
        """Kill another caller, then the server, at random moments, and start it again."""
        self._compare()
        self._base = None
        self._other = other = endless_caller(server.url)
        out = other.stdout
        assert out is not None
        self._go_on(lambda: bool(select.select([out], [], [], 0)[0]), "another process makes calls")
        if (line := out.readline()) != "called\n":
            raise RuntimeError(f"another caller: expected calls, got {line!r}")
        self._go_on_for(self._chance.uniform(0, MOMENT_SECONDS))
        with other:
            other.kill()
        self._go_on_for(self._chance.uniform(0, MOMENT_SECONDS))
        server.kill()
        self._server = again = Server(self._folder, server.port)
        self._go_on(again.is_ready, "the server is ready again")
        # More than were enqueued before it was.
        ends = [caller.replays + AHEAD + 1 for caller in self._callers]
        self._go_on(
            lambda: all(caller.replays >= end for caller, end in zip(self._callers, ends, strict=True)),
            "callers go on with the server that was started again",
        )
        self._compare()
        self._kills += 1

    def _go_on_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._go_on(lambda: time.monotonic() >= end, "time passes")

    def _go_on(self, until: Callable[[], bool], what: str, replays: bool = True) -> None:
        """Replay graphs, or only wait for them, until a condition holds, which is looked at now and then.

        Raises TimeoutError, RuntimeError, ServerUnreachableError.
        """
        looks = 0.0
        while True:
            is_idle = True
            for caller in self._callers:
                caller.collect()
                if replays and caller.num_pending < AHEAD:
                    caller.replay(self._chance.choice(TOKENS))
                    is_idle = False
            if time.monotonic() >= looks:
                looks = time.monotonic() + LOOK_SECONDS
                self._look()
                if until():
                    return
                if self._elapsed > self._seconds - END_SECONDS / 2:
                    raise TimeoutError(f"not in time: {what}")
            elif is_idle:
                time.sleep(IDLE_SECONDS)

    def _look(self) -> None:
        """Raise if a call has failed, or an output differs; print how far it is."""
        if time.monotonic() >= self._reported + REPORT_SECONDS:
            self._reported = time.monotonic()
            made = self._made["calls"]
            numbers = f"{made:,} calls, {self._mismatches} mismatches, {self._kills} kills"
            print(f"soak: {self._elapsed:.0f} s, {numbers}{self._outlook()}", flush=True)
        for number, caller in enumerate(self._callers):
            caller.channel.check()
            if caller.mismatches:
                raise RuntimeError(f"outputs of caller {number}: {caller.mismatches} words differ")

    def _outlook(self) -> str:
        """How fast calls are made, and how many that will be, once a moment is known to count from."""
        if not self._moments or self._elapsed <= (began := self._moments[0])[0]:
            return ""
        rate = (self._made["calls"] - began[1]) / (self._elapsed - began[0])
        most = self._made["calls"] + rate * max(0.0, self._seconds - END_SECONDS - self._elapsed)
        return f", {rate:,.0f} calls/s, for {min(most, self._calls):,.0f} of {self._calls:,} in time"

    def _compare(self) -> None:
        """Have all calls end, and compare their number with what the server has counted."""
        self._go_on(lambda: not any(each.num_pending for each in self._callers), "calls end", replays=False)
        made = self._made
        self._moments.append((self._elapsed, made["calls"]))
        counted = self._counted()
        if self._base is not None:
            counted_before, made_before = self._base
            calls, tokens = (made[name] - made_before[name] for name in ("calls", "tokens"))
            wanted = Counted(calls // LAYERS, tokens // LAYERS)  # as many to each layer
            for name, now in counted.items():
                before = counted_before[name]
                got = Counted(now.calls - before.calls, now.tokens - before.tokens)
                if got != wanted:
                    raise RuntimeError(f"metrics of {name}: expected {wanted} more, got {got}")
            self._compared += calls
        self._base = counted, made

    def _counted(self) -> dict[str, Counted]:
        """By the server, which counts a call a little after its answer."""
        assert self._server is not None
        before = counted_in(self._server.metrics())
        while True:
            time.sleep(LOOK_SECONDS)
            if (now := counted_in(self._server.metrics())) == before:
                return now
            before = now


def report(soak: Soak, file: Path | None) -> None:
    """Print the result, and write it."""
    text = json.dumps(soak.result(), indent=1)
    print(text, flush=True)
    if file:
        file.write_text(text + "\n")


def give_up(soak: Soak, file: Path | None) -> None:
    """End the process, whatever its other threads wait for."""
    soak.failure = "expected an end in time, got none"
    faulthandler.dump_traceback()
    soak.end_processes()
    report(soak, file)
    os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.device_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calls", type=int, default=10_000_000, help="to be made, if there is time")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything, at least 60")
    parser.add_argument("--callers", type=int, default=4, help=f"at most {MAX_CALLERS}")
    parser.add_argument("--kills", type=int, default=0, help="of the server, if there is time")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--json", type=Path, help="file for the result")
    given = parser.parse_args(arguments)
    for name, low, high in (
        ("calls", 1, float("inf")),
        ("seconds", LEAST_SECONDS, float("inf")),
        ("callers", 1, MAX_CALLERS),
        ("kills", 0, float("inf")),
    ):
        if not low <= (value := getattr(given, name)) <= high:
            parser.error(f"--{name}: expected {low} to {high}, got {value}")
    if (count := torch.cuda.device_count()) < 2:
        print(f"soak: expected two GPUs, of the server and its callers, got {count}", file=sys.stderr)
        return 1
    print(f"soak: seed {given.seed}", flush=True)
    torch.cuda.set_device(CALLER)
    torch.manual_seed(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given.calls, given.seconds, given.callers, given.kills, given.seed)
        timer = threading.Timer(given.seconds - END_SECONDS / 4, give_up, (soak, given.json))
        timer.daemon = True
        timer.start()
        try:
            soak.run()
        except Exception as error:
            traceback.print_exc()
            soak.failure = f"{type(error).__name__}: {error}"
        finally:
            timer.cancel()
            soak.end_processes()
    report(soak, given.json)
    return 1 if soak.failure else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # after a failure, kernels may wait for a server
