"""Servers and their callers in virtual time: no sockets, and no clock but that of the events.

Callers have the client's own pools; what their servers do, and how they are watched, is modelled here.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator
from itertools import count
from random import Random
from typing import Any

import numpy as np

from expertd.service.engine.queue_counts import Backlog, may_wait, why_full
from expertd.service.settings.parts import Limits
from expertd_client.calls import LayerCall, layer_call
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, ServerBusyError, ServerUnreachableError
from expertd_client.pool import Member, ServerPool
from expertd_client.steps import Sleep, Steps

TOKENS = 64  # of a call
LIMITS = Limits(max_batch_tokens=16 * TOKENS, max_request_tokens=TOKENS, max_queue_tokens=128 * TOKENS)
_STEP_CALLS = LIMITS.max_batch_tokens // TOKENS
FIXED_PART = 0.2  # of a full step, whatever its tokens are
ROUND_TRIP_SECONDS = 5e-4
SPREAD = 0.1  # of a step's time, as the sigma of a lognormal distribution
COLD, COLD_SECONDS = 3.0, 1.0  # how many times as long steps take for so long after a start
FAILOVER_SECONDS, MAX_RETRIES = 1.0, 3  # the client's defaults
_LOOK_SECONDS, _PATIENCE, _HEARTBEAT = 0.1, 0.25, 0.5  # of `expertd_client.watch`, with these defaults
_BACK_SECONDS, _UPDATE_SECONDS = 0.25, 1.0


class Events:
    """What happens when, in seconds; events of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._next: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()

    def after(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Have `act` called."""
        heapq.heappush(self._next, (self.now + seconds, next(self._number), act, arguments))

    def run(self, goes_on: Callable[[], bool]) -> None:
        """One after the other while `goes_on`."""
        while self._next and goes_on():
            self.now, _, act, arguments = heapq.heappop(self._next)
            act(*arguments)


class Attempt:
    """A call at one server: a pool's step, which `resume` goes on with."""

    __slots__ = ("is_open", "resume", "server", "told")

    def __init__(self, server: "SimulatedServer") -> None:
        self.server, self.is_open = server, True
        self.told = 0.0  # by the server, with its answer: what `due` was then
        self.resume: Callable[[ExpertError | None], None] = lambda _: None

    def end(self, error: ExpertError | None = None) -> None:
        """It is answered, once."""
        if self.is_open:
            self.is_open = False
            self.resume(error)


class SimulatedServer:
    """Computes what waits in steps, each with what has come by then; refuses as a server does.

    full_seconds  of a step of as many tokens as may be in one
    slowness      how many times as long its steps take
    """

    def __init__(self, events: Events, chance: Random, full_seconds: float, slowness: float = 1.0) -> None:
        self._events, self._chance = events, chance
        self._seconds, self.slowness = full_seconds * slowness, slowness
        self.url = ""
        self.state = "up"  # or draining, gone, hung
        self.num_attempts = 0
        self.on_drained: Callable[[], None] = lambda: None
        self._queue = deque[Attempt]()
        self._step: list[Attempt] | None = None
        self._started = 0  # how often
        self._cold_until = -1.0
        self._step_seconds = self._ends_at = 0.0
        self._is_late = False  # whether its step would have ended, if it did not hang

    def accept(self, attempt: Attempt) -> None:
        """Put a call into the queue, or refuse it."""
        self.num_attempts += 1
        waiting = len(self._queue) * TOKENS
        if self.state == "gone":
            self._refuse(attempt, ServerUnreachableError("connection refused"))
        elif self.state == "draining":
            self._refuse(attempt, ServerBusyError("the server is shutting down", 503))
        elif not may_wait(LIMITS, len(self._queue) + 1, waiting + TOKENS):
            backlog = Backlog(len(self._queue), waiting, self._step_seconds, LIMITS.max_batch_tokens)
            full = why_full(LIMITS, "m", backlog, TOKENS)
            attempt.told = self.due()
            self._refuse(attempt, ServerBusyError(str(full), 503, full.retry_after))
        else:
            self._queue.append(attempt)
            if self._step is None and self.state == "up":
                self._begin()

    def due(self) -> float:
        """Seconds until a call would be answered that came now: what nobody but the server knows."""
        if self.state != "up":
            return math.inf
        left = 0.0 if self._step is None else self._ends_at - self._events.now
        full, rest = divmod(len(self._queue), _STEP_CALLS)
        return left + (full + _part(rest + 1)) * self._seconds

    def drain(self, then: Callable[[], None]) -> None:
        """Refuse calls, and go when those of before are answered."""
        self.state, self.on_drained = "draining", then
        if self._step is None:
            self._go()

    def kill(self) -> None:
        """Go at once; all connections break."""
        self.state = "gone"
        self._started += 1
        for attempt in [*(self._step or ()), *self._queue]:
            self._refuse(attempt, ServerUnreachableError("the connection broke"))
        self._step, self._is_late = None, False
        self._queue.clear()

    def start(self) -> None:
        """Come back, cold."""
        self.state, self._cold_until = "up", self._events.now + COLD_SECONDS
        self._step_seconds = 0.0

    def stop(self) -> None:
        """Hang; calls are neither answered nor refused."""
        self.state = "hung"

    def go_on(self) -> None:
        """Hang no longer."""
        self.state = "up"
        if self._is_late:
            self._is_late = False
            self._end(self._started)
        elif self._step is None and self._queue:
            self._begin()

    def _begin(self) -> None:
        self._step = [self._queue.popleft() for _ in range(min(_STEP_CALLS, len(self._queue)))]
        seconds = _part(len(self._step)) * self._seconds * self._chance.lognormvariate(0, SPREAD)
        if self._events.now < self._cold_until:
            seconds *= COLD
        self._step_seconds = 0.8 * (self._step_seconds or seconds) + 0.2 * seconds
        self._ends_at = self._events.now + seconds
        self._events.after(seconds, self._end, self._started)

    def _end(self, started: int) -> None:
        if started != self._started:
            return  # it was killed
        if self.state == "hung":
            self._is_late = True
            return
        answered, self._step = self._step, None
        if self._queue:
            self._begin()
        self._events.after(ROUND_TRIP_SECONDS, _answer, answered, self.due())
        if self._step is None and self.state == "draining":
            self._go()

    def _go(self) -> None:
        self.state = "gone"
        self.on_drained()

    def _refuse(self, attempt: Attempt, error: ExpertError) -> None:
        self._events.after(ROUND_TRIP_SECONDS, attempt.end, error)


def _part(calls: int) -> float:
    """The share of a full step's time that a step of this many calls takes."""
    return FIXED_PART + (1 - FIXED_PART) * calls / _STEP_CALLS


def _answer(step: list[Attempt], told: float) -> None:
    for attempt in step:
        attempt.told = told
        attempt.end()


class Listed:
    """The servers by address, as all callers find them, a little later."""

    def __init__(self, nowhere: SimulatedServer) -> None:
        self._nowhere = nowhere
        self._by_url: dict[str, SimulatedServer] = {}
        self._number = count()

    def add(self, server: SimulatedServer) -> None:
        """With a new address."""
        server.url = f"http://{next(self._number)}"
        self._by_url[server.url] = server

    def remove(self, server: SimulatedServer) -> None:
        """Its address is nobody's from now on."""
        del self._by_url[server.url]

    def at(self, url: str) -> SimulatedServer:
        """Who answers there."""
        return self._by_url.get(url, self._nowhere)

    def urls(self) -> list[str]:
        """See `expertd_client.sources.Source`."""
        return list(self._by_url)


class SimulatedLink:
    """A caller's connections to one server: what a pool takes for a `Server`."""

    is_local = True

    def __init__(self, url: str, listed: Listed) -> None:
        self.url, self._listed = url, listed
        self.told = 0.0  # by the last answer
        self._open: dict[Attempt, None] = {}

    def infer(self, call: LayerCall, deadline: Deadline) -> Generator[Any, Any, None]:
        """See `expertd_client.server.Server`, also for the others."""
        attempt = Attempt(self._listed.at(self.url))
        self._open[attempt] = None
        try:
            yield attempt
        finally:
            self.told = attempt.told
            del self._open[attempt]

    def break_off(self) -> None:
        for attempt in list(self._open):
            attempt.end(ServerUnreachableError("the server hangs"))

    def close(self) -> Steps[None]:
        yield from ()


class CallersPool(ServerPool):
    """The client's, of servers that have all experts, so that it need not ask who has which."""

    def __init__(self, caller: "Caller", events: Events, listed: Listed) -> None:
        def link(url: str) -> Any:
            return SimulatedLink(url, listed)

        self.listed, self._caller = listed, caller
        super().__init__(listed, link, FAILOVER_SECONDS, MAX_RETRIES, lambda: events.now)

    def mark(self, member: Member, state: Any, reason: str = "") -> None:
        """A member that is not up is asked again later."""
        was_up = member.state == "up"
        super().mark(member, state, reason)
        if was_up and state != "up":
            self._caller.ask_later(member)

    def member_at(self, url: str) -> Member | None:
        """Which has this address."""
        return self._members.get(url)

    def _by_owners(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        return self._by_one(call, None, self.members, deadline)


class Caller:
    """A process with a pool of its own, which is watched as `expertd_client.watch` does it."""

    def __init__(
        self, events: Events, chance: Random, listed: Listed, make: Callable[..., CallersPool]
    ) -> None:
        self._events, self._chance, self._listed = events, chance, listed
        self.pool = make(self, events, listed)
        self._call, self._deadline = layer_call("m", np.zeros((TOKENS, 1), np.float32)), Deadline(math.inf)
        self._urls = listed.urls()
        events.after(chance.random() * _UPDATE_SECONDS, self._update)

    def call(self, ended: Callable[[bool, float, int], None]) -> None:
        """Make a call; `ended`, with whether it was answered, its seconds, and the number of attempts."""
        _Call(self._events, self.pool.infer(self._call, self._deadline), ended)

    def watch(self, server: SimulatedServer) -> None:
        """Look at a server that hangs: other looks would change nothing."""
        self._events.after(self._chance.random() * _LOOK_SECONDS, self._look, server)

    def ask_later(self, member: Member) -> None:
        """Ask a member that is not up whether it is back."""
        self._events.after(_BACK_SECONDS * (1 + self._chance.random()), self._ask, member)

    def _ask(self, member: Member) -> None:
        if self._listed.at(member.url).state == "up":
            self.pool.mark(member, "up")
        elif not member.is_gone:
            self.ask_later(member)

    def _look(self, server: SimulatedServer) -> None:
        member = self.pool.member_at(server.url)
        if member is None or server.state != "hung":
            return
        if member.state == "up" and self.pool.waits(member, _PATIENCE * FAILOVER_SECONDS):
            self._events.after(_HEARTBEAT * FAILOVER_SECONDS, self._miss, server, member)
        else:
            self._events.after(_LOOK_SECONDS, self._look, server)

    def _miss(self, server: SimulatedServer, member: Member) -> None:
        if server.state == "hung":
            self.pool.mark(member, "down", "no heartbeat")
            if self.pool.can_do_without(member):
                member.server.break_off()

    def _update(self) -> None:
        if (urls := self._listed.urls()) != self._urls:
            self._urls = urls
            self.pool.update()
        self._events.after(_UPDATE_SECONDS, self._update)


class _Call:
    """Takes the steps of a pool's call."""

    def __init__(self, events: Events, steps: Steps[None], ended: Callable[[bool, float, int], None]) -> None:
        self._events, self._steps, self._ended = events, steps, ended
        self._began, self._attempts = events.now, 0
        self._resume(None)

    def _resume(self, error: ExpertError | None) -> None:
        try:
            wait: Any = self._steps.send(None) if error is None else self._steps.throw(error)
        except StopIteration:
            self._ended(True, self._events.now - self._began, self._attempts)
        except ExpertError:
            self._ended(False, self._events.now - self._began, self._attempts)
        else:
            if isinstance(wait, Sleep):
                self._events.after(wait.seconds, self._resume, None)
            else:
                self._attempts += 1
                wait.resume = self._resume
                wait.server.accept(wait)
