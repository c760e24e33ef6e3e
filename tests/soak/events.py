"""Servers that are killed, stopped and drained under callers, and what becomes of the calls."""

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tests.service.waiting import wait_for
from tests.soak.server import SoakServer
from tests.soak.soaking import header

T = TypeVar("T")
EVENTS = "kill", "stop", "drain"
FAILOVER_SECONDS = 1.0
STOPPED_SECONDS = 3.0
BACK_SECONDS = 300.0  # until callers know that a server is back, at most


class Began(NamedTuple):
    """When a call began, in which event, and the events by then."""

    at: float
    when: str
    events: int


class EventSoak:
    """A subclass starts `servers`, each with its settings, and callers, who have their calls counted here.

    seconds  for all events
    every    seconds from one to the next
    late     seconds that no call should take
    waits    events for which calls wait, whatever time that takes
    """

    def __init__(
        self, seconds: float, every: float, late: float, seed: int, waits: Collection[str] = ()
    ) -> None:
        self._seconds, self._every, self._late, self._waits = seconds, every, late, waits
        self.chance = random.Random(seed)
        self.servers: list[tuple[SoakServer, Any]] = []
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._wrong: Counter[str] = Counter()  # by event
        self._errors: list[str] = []
        self._times: dict[str, list[float]] = {when: [] for when in ("calm", *EVENTS)}  # of calls, in seconds
        self._when = "calm"
        self._events: list[str] = []  # that have begun
        self.is_over = False

    def run_callers(self, callers: Sequence[Callable[[], object]], is_up: Callable[[str], bool]) -> None:
        """Have the callers run in threads, until `is_over`, while servers go.

        is_up  whether the callers take the server with this URL for one that answers
        """
        threads = [threading.Thread(target=caller) for caller in callers]
        try:
            for thread in threads:
                thread.start()
            self._disturb(is_up)
        finally:
            self.is_over = True
            for thread in threads:
                thread.join()

    def chosen(self) -> tuple[SoakServer, Any]:
        """The server that goes next."""
        return self.chance.choice(self.servers)

    def begin(self) -> Began:
        """Of a call."""
        return Began(time.monotonic(), self._when, len(self._events))

    def count(self, began: Began, is_right: bool) -> None:
        """A call is answered. It belongs to an event that went on at any time of it."""
        seconds = time.monotonic() - began.at
        with self._lock:
            when = self._when
            if when == "calm":
                when = self._events[-1] if len(self._events) > began.events else began.when
            is_late = seconds > self._late and when not in self._waits
            self._counts.update(calls=1, wrong=int(not is_right), late=int(is_late))
            if not is_right:
                self._wrong[when] += 1
            self._times[when].append(seconds)

    def lost(self, error: Exception) -> None:
        """A call has no answer."""
        with self._lock:
            self._counts.update(calls=1, lost=1)
            self._errors.append(f"{type(error).__name__}: {error}"[:300])

    def call(self, made: Callable[[], T], is_right: Callable[[T], bool]) -> None:
        """Make a call, and count it."""
        began = self.begin()
        try:
            output = made()
        except Exception as error:
            self.lost(error)
            time.sleep(0.1)
        else:
            self.count(began, is_right(output))

    def result(self) -> dict[str, Any]:
        """Counts, and times in ms."""
        return {
            "calls": self._counts["calls"],
            "lost": self._counts["lost"],
            "wrong": self._counts["wrong"],
            "late": self._counts["late"],
            "wrong_during": dict(self._wrong),
            "events": dict(Counter(self._events)),
            "waits": list(self._waits),
            "times": {when: _percentiles(seconds) for when, seconds in self._times.items()},
            "errors": self._errors,
        }

    def _disturb(self, is_up: Callable[[str], bool]) -> None:
        """Have one server after the other go, in all ways."""
        end = time.monotonic() + self._seconds
        while time.monotonic() + self._every < end or len(self._events) < len(EVENTS):
            began = time.monotonic()
            event = EVENTS[len(self._events) % len(EVENTS)]
            time.sleep(self.chance.uniform(0.3, 0.5) * self._every)
            server, settings = self.chosen()
            gone = time.monotonic()
            with self._lock:
                self._when = event
                self._events.append(event)
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
            wait_for(lambda url=server.url: is_up(url), f"{server.url} is back", BACK_SECONDS)  # type: ignore[misc]
            seconds = time.monotonic() - gone
            self._when = "calm"
            counts = self._counts
            made = f"{counts['calls']:,} calls, {counts['lost']} lost, {counts['wrong']} wrong"
            print(f"soak: {event} of {server.url}, back after {seconds:.1f} s: {made}", flush=True)
            time.sleep(max(0.0, began + self._every - time.monotonic()))


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p99, longest = (round(1e3 * value, 2) for value in np.percentile(seconds, [50, 99, 100]))
    return {"calls": len(seconds), "p50_ms": p50, "p99_ms": p99, "max_ms": longest}


def mistakes(result: Mapping[str, Any], is_quiet: bool = True) -> list[str]:
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
        if p99 > 3 * calm and event not in result["waits"]:
            found.append(f"p99: expected at most 3 times {calm} ms during {event}, got {p99}")
    return found


def new_parser(prog: str, text: str | None) -> argparse.ArgumentParser:
    """The options of a soak with events."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=(text or "").partition(":")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two events")
    parser.add_argument("--late", type=float, default=2 * FAILOVER_SECONDS, help="seconds of a call")
    parser.add_argument("--busy", action="store_true", help="others use the machine: ignore times")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--json", type=Path)
    return parser


def reported(
    given: argparse.Namespace, run: Callable[[], Mapping[str, Any]], about: Mapping[str, Any] | None = None
) -> int:
    """Print the result of a run, and write it: the exit code."""
    began = time.monotonic()
    result = run()
    options = {name: getattr(given, name) for name in ("every", "late", "seed")}
    head = header(time.monotonic() - began) | options | dict(about or {})
    text = json.dumps({"header": head, **result}, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    wrong = mistakes(result, not given.busy)
    for each in wrong:
        print(f"soak: {each}", file=sys.stderr)
    return 1 if wrong else 0
