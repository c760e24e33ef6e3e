"""Which rule of choice suits a pool of many servers: `python -m benchmarks pool_rules [--json FILE]`.

A simulation in virtual time (pool_world.py): 1,000 callers, each with a pool of its own, of 64 servers. 1 %
of them, at least one, take ten times as long. One after the other is restarted, as by a rolling update: it
drains, is away for 2 s, and comes back cold and at another address. One is killed, and one hangs for 3 s.

Servers compute what has come by the end of a step in the next one, up to 16 calls; a fifth of a full step's
time is the same for any number of calls. Queues have room for 128 calls. Load is a part of what servers do
with full steps.

open     calls arrive at random (Poisson), whether or not earlier ones of the caller are answered
engine   a caller makes one call after the other, as for the layers of decode steps, and computes in between;
         steps are five times as short, so that there are five times as many calls

The time of a call is that until its answer, whatever became of it meanwhile. lost: calls that raised an
error; moved: those that were sent more than once; slow: the part of attempts that were at slow servers.
"""

import gc
import logging
import math
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.run import Result, Row, earlier, new_parser
from benchmarks.serving.pool_world import LIMITS, TOKENS, Caller, CallersPool, Events, Listed, SimulatedServer
from expertd_client.pool import Member

FULL_SECONDS = {"open": 0.06, "engine": 0.012}  # of a step
WARM_SECONDS, SECONDS = {"open": 3.0, "engine": 1.5}, {"open": 6.0, "engine": 3.0}
LOADS = {"open": (0.5, 0.8, 0.95), "engine": (0.8,)}
SLOWNESS = 10.0
EVERY_SECONDS, AWAY_SECONDS, HANG_SECONDS = 2.5, 2.0, 3.0
_HALF_LIFE, _STAYS = 5.0, 0.75  # of the pool's rule


class Before(CallersPool):
    """The least expected time of all, in the order of the list; the last one unless it is much longer.

    How long calls without an answer have waited did not count.
    """

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        def expected(member: Member) -> float:
            return _faded(member, size, now) * (1 + len(member.begun))

        best = min(up, key=lambda member: (expected(member), len(member.begun)))
        stays = last is not None and last in up and size in last.seconds
        return last if last is not None and stays and expected(best) >= _STAYS * expected(last) else best


class Peak(CallersPool):
    """The least expected time of all."""

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        return min(up, key=lambda member: (member.expected(size, now), random.random()))


class Told(CallersPool):
    """The pool's rule, by what servers said with their last answers: when a further call would be done."""

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        def told(member: Member) -> float:
            server: Any = member.server
            waited = now - next(iter(member.begun.values()), now)
            return max(_faded(member, size, now, server.told), waited) * (1 + len(member.begun))

        if last is not None and last in up and size in last.seconds:
            other = random.choice([member for member in up if member is not last] or [last])
            return other if told(other) < _STAYS * told(last) else last
        return min(_two(up), key=told)


class TwoChoices(CallersPool):
    """The less expected time of two at random."""

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        return min(_two(up), key=lambda member: member.expected(size, now))


class LeastCalls(CallersPool):
    """The fewest calls of this caller."""

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        return min(up, key=lambda member: (len(member.begun), random.random()))


class InTurn(CallersPool):
    """Round robin, from anywhere on."""

    def __init__(self, *given: Any) -> None:
        self._turn = count(random.randrange(1000))
        super().__init__(*given)

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        return up[next(self._turn) % len(up)]


class AtRandom(CallersPool):
    """Any."""

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        return random.choice(up)


class Oracle(CallersPool):
    """The one of two at random that has less to do at this moment: no caller can know it."""

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        return min(_two(up), key=lambda member: self.listed.at(member.url).due())


def _faded(member: Member, size: int, now: float, seconds: float | None = None) -> float:
    """What is known of a call's time, or `seconds`, as it is forgotten; 0: nothing."""
    taken, at = member.seconds.get(size, (0.0, now))
    return (taken if seconds is None else seconds) * math.exp2((at - now) / _HALF_LIFE)


def _two(up: Sequence[Member]) -> list[Member]:
    return random.sample(up, min(2, len(up)))


RULES: dict[str, Callable[..., CallersPool]] = {
    "the last and another": CallersPool,
    "the same, told by servers": Told,
    "all, in order (before)": Before,
    "all (peak EWMA)": Peak,
    "two at random": TwoChoices,
    "fewest own calls": LeastCalls,
    "round robin": InTurn,
    "random": AtRandom,
    "two, by their queues": Oracle,
}
"""The first is the pool's own; the last one is no rule, but a bound."""


class Case(NamedTuple):
    """A row."""

    kind: str
    load: float
    rule: str
    seed: int
    num_callers: int = 1000
    num_servers: int = 64
    seconds: float | None = None  # None: those of the kind

    @property
    def end(self) -> float:
        """Seconds until the last call begins."""
        return self.seconds or WARM_SECONDS[self.kind] + SECONDS[self.kind]


class Simulation:
    """A case from its start to its end."""

    def __init__(self, case: Case) -> None:
        random.seed(case.seed)  # also for the pools
        self._case, self._chance, self._events = case, random.Random(case.seed), Events()
        self._warm = min(WARM_SECONDS[case.kind], case.end / 2)
        full_seconds, num_slow = FULL_SECONDS[case.kind], max(1, round(case.num_servers / 100))
        new = partial(SimulatedServer, self._events, self._chance, full_seconds)
        self._slow = [new(SLOWNESS) for _ in range(num_slow)]
        self._fast = [new() for _ in range(case.num_servers - num_slow)]
        self._servers = [*self._fast, *self._slow]
        self._chance.shuffle(self._servers)
        nowhere = new()
        nowhere.kill()
        self._listed = Listed(nowhere)
        for server in self._servers:
            self._listed.add(server)
        of_full = LIMITS.max_batch_tokens / TOKENS / full_seconds
        self._rate = case.load * of_full * (len(self._fast) + num_slow / SLOWNESS) / case.num_callers
        self._pause = max(0.0, 1 / self._rate - full_seconds)  # of an engine, if calls take a full step
        self._callers = [
            Caller(self._events, self._chance, self._listed, RULES[case.rule])
            for _ in range(case.num_callers)
        ]
        self._open = self._moved = self._lost = 0
        self._seconds: list[float] = []
        self._attempts: list[int] = []  # before it was warm

    def run(self) -> Row:
        """The row."""
        self._begin()
        self._disturb()
        self._events.after(self._warm, self._note_attempts)
        with _in_silence():
            self._events.run(lambda: self._events.now < self._case.end or self._open > 0)
        made = {
            server: server.num_attempts - before
            for server, before in zip(self._servers, self._attempts, strict=True)
        }
        slow = sum(made[server] for server in self._slow) / sum(made.values())
        p50, p99, p999, longest = np.percentile(self._seconds, (50, 99, 99.9, 100))
        return {
            "kind": self._case.kind,
            "load": self._case.load,
            "rule": self._case.rule,
            "seed": self._case.seed,
            "calls": len(self._seconds) + self._lost,
            "p50_ms": _ms(p50),
            "p99_ms": _ms(p99),
            "p999_ms": _ms(p999),
            "longest_ms": _ms(longest),
            "lost": self._lost,
            "moved": self._moved,
            "slow": round(float(slow), 5),
        }

    def _begin(self) -> None:
        for caller in self._callers:
            if self._case.kind == "open":
                self._events.after(self._chance.expovariate(self._rate), self._arrive, caller)
            else:
                self._events.after(self._chance.random() / self._rate, self._call, caller)

    def _arrive(self, caller: Caller) -> None:
        self._events.after(self._chance.expovariate(self._rate), self._arrive, caller)
        self._call(caller)

    def _call(self, caller: Caller) -> None:
        if self._events.now >= self._case.end:
            return
        self._open += 1
        is_counted = self._events.now >= self._warm

        def ended(is_answered: bool, seconds: float, attempts: int) -> None:
            self._open -= 1
            if is_counted and is_answered:
                self._seconds.append(seconds)
            if is_counted:
                self._lost += not is_answered
                self._moved += attempts > 1
            if self._case.kind == "engine":
                self._events.after(self._pause * self._chance.uniform(0.8, 1.2), self._call, caller)

        caller.call(ended)

    def _disturb(self) -> None:
        """Restart healthy servers in turn, kill one, have one hang."""
        healthy = self._chance.sample(self._fast, len(self._fast))
        if len(healthy) > 2:
            killed, hung = healthy.pop(), healthy.pop()
            self._events.after(self._warm + EVERY_SECONDS / 2, self._kill, killed)
            self._events.after(self._warm + EVERY_SECONDS, self._hang, hung)
        for number, server in enumerate(healthy):
            self._events.after(self._warm + number * EVERY_SECONDS, self._restart, server)

    def _restart(self, server: SimulatedServer) -> None:
        if self._events.now < self._case.end:
            self._listed.remove(server)
            server.drain(lambda: self._events.after(AWAY_SECONDS, self._is_back, server))

    def _is_back(self, server: SimulatedServer) -> None:
        server.start()
        self._listed.add(server)

    def _kill(self, server: SimulatedServer) -> None:
        server.kill()
        self._events.after(AWAY_SECONDS, server.start)

    def _hang(self, server: SimulatedServer) -> None:
        server.stop()
        self._events.after(HANG_SECONDS, server.go_on)
        for caller in self._callers:
            caller.watch(server)

    def _note_attempts(self) -> None:
        self._attempts = [server.num_attempts for server in self._servers]


@contextmanager
def _in_silence() -> Iterator[None]:
    """Without log lines, as a server that goes is news to each caller, and without the garbage collector.

    It would look through all pools again and again, and what calls leave has no cycles.
    """
    gc.collect()
    gc.disable()
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


def _ms(seconds: float) -> float:
    return round(1e3 * float(seconds), 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each case."""
    parser = new_parser(__doc__)
    parser.add_argument("--kind", choices=LOADS, nargs="+", default=list(LOADS))
    parser.add_argument("--rule", choices=RULES, nargs="+", default=list(RULES))
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 on")
    parser.add_argument("--callers", type=int, default=Case._field_defaults["num_callers"])
    parser.add_argument("--servers", type=int, default=Case._field_defaults["num_servers"])
    parser.add_argument("--seconds", type=float, help="virtual ones; default: those of the kind")
    given = parser.parse_args(arguments)
    header = {"python": platform.python_version(), "callers": given.callers, "servers": given.servers}
    keys = "kind", "load", "rule", "seed"
    result = Result(given.json, header | {"seeds": given.seeds}, earlier(given.json), keys)
    for kind in given.kind:
        for load in LOADS[kind]:
            for rule in given.rule:
                for seed in range(given.seeds):
                    case = Case(kind, load, rule, seed, given.callers, given.servers, given.seconds)
                    result.put(Simulation(case).run())
    return 0
