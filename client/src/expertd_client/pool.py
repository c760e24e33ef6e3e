"""Several servers as one: which of them computes a call, and what happens when one goes.

A layer may be on several servers, and its experts may be divided among them. Of two equal servers, a call
goes to the one that is expected to be done first; if that dies, hangs or drains, to another one.
"""

import logging
import math
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from expertd_client.calls import LayerCall
from expertd_client.channel.link import ChannelClient
from expertd_client.deadline import Deadline
from expertd_client.errors import (
    AccessDeniedError,
    DeadlineError,
    ExpertError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.metadata import ModelMetadata, ServerState
from expertd_client.outcomes import Outcome, outcome_of
from expertd_client.retries import is_late, with_retries
from expertd_client.server import Server
from expertd_client.sources import UrlSource
from expertd_client.splitting import ExpertOwner, check_same, owners_of, split
from expertd_client.steps import Steps, run
from expertd_client.transport import TransportName

logger = logging.getLogger("expertd_client")

T = TypeVar("T")
State = Literal["up", "draining", "down"]
STATES: tuple[State, ...] = get_args(State)
_UNKNOWN_SECONDS = 5.0  # until a server is asked again for a model that it did not have
_HALF_LIFE = 5.0  # seconds until half of what a server took is forgotten, so that it is tried again
_STAYS = 0.75  # of the last server's expected time: a call leaves it for another one that has less
_REPEATS, _FIRST_REPEATS = 0.1, 10.0  # because servers are full: that each call allows, and at once
_CHANNELS = "/v1/channels"


class _GoneError(Exception):
    """All servers that were to be asked have left the list: there is another one now."""


@dataclass(eq=False, slots=True)
class Member:
    """A server of a pool, and how it does. The pool's lock guards all but `server`."""

    server: Server
    state: State = "up"
    reason: str = ""
    is_gone: bool = False  # from the list: it is closed after its last call
    is_late: bool = False  # a call's time passed here, so that it should say whether it lives
    begun: dict[object, float] = field(default_factory=dict)  # calls without an answer, by when they began
    ended: Counter[str] = field(default_factory=Counter)  # infer calls, but for those that were given up
    breaks: int = 0  # how often its calls were broken off
    opened: object = None  # the channel that was opened last
    # Open ones, by the first request without an answer, and since when it is that.
    links: "weakref.WeakKeyDictionary[ChannelClient, tuple[int, float]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    layers: dict[str, tuple[ModelMetadata | None, float]] = field(default_factory=dict)  # and when it said so
    seconds: dict[int, tuple[float, float]] = field(default_factory=dict)  # of calls by size, and when

    @property
    def url(self) -> str:
        return self.server.url

    def expected(self, size: int, now: float) -> float:
        """Seconds until a further call of this size is done; 0: unknown.

        It will take as long as those before, or as the oldest one without an answer has taken by now.
        """
        taken, at = self.seconds.get(size, (0.0, now))
        oldest = next(iter(self.begun.values()), now)
        return max(taken * math.exp2((at - now) / _HALF_LIFE), now - oldest) * (1 + len(self.begun))

    def waits_since(self, now: float) -> float:
        """When the oldest call or request of a channel began that has no answer; inf: there is none."""
        oldest = min(self.begun.values(), default=math.inf)
        for link in [link for link in self.links if link.is_open]:
            sequence, since = link.oldest(), now
            if sequence and self.links[link][0] == sequence:
                since = self.links[link][1]
            self.links[link] = sequence, since
            oldest = min(oldest, since if sequence else math.inf)
        return oldest

    def asked(self, steps: Steps[T]) -> Steps[T]:
        """What the server answers. Once its calls are broken off, none waits for it again.

        Their ends look like lost connections, for which a transport would make another one.
        """
        breaks = self.breaks
        try:
            wait = next(steps)
            while self.breaks == breaks:
                try:
                    given = yield wait
                except BaseException as error:
                    wait = steps.throw(error)
                else:
                    wait = steps.send(given)
        except StopIteration as stop:
            result: T = stop.value
            return result
        steps.close()
        raise ServerUnreachableError(f"server {self.url}: expected an answer, got none: it hangs")

    def break_off(self) -> None:
        """End all of its calls, which then go elsewhere."""
        self.breaks += 1
        self.server.break_off()
        for link in list(self.links):
            link.hang_up()

    def took(self, size: int, seconds: float, now: float) -> None:
        """A call has taken so long. Slow ones count at once, and are forgotten slowly."""
        before, at = self.seconds.get(size, (seconds, now))
        before *= math.exp2((at - now) / _HALF_LIFE)
        self.seconds[size] = max(seconds, 0.8 * before + 0.2 * seconds), now


class ServerPool:
    """Members, and calls to them. May be used by several threads, or by tasks of one event loop.

    make              makes a server of a URL
    failover_seconds  within which calls leave a server that hangs
    max_retries       how often a call is made again of which all servers say when they have room
    clock             seconds, of which only differences count
    on_call           is called when a call begins
    """

    on_call: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        source: UrlSource,
        make: Callable[[str], Server],
        failover_seconds: float,
        max_retries: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._make, self._clock = source, make, clock
        self.failover_seconds, self._max_retries = failover_seconds, max_retries
        self._lock = threading.RLock()  # while it is held, the garbage of calls may be collected: see _end
        self._members: dict[str, Member] = {}
        self._models: set[str] = set()  # that calls have asked for, and a server has
        self._last: dict[tuple[str, frozenset[int] | None], Member] = {}  # that a layer's calls went to
        self._repeats = _FIRST_REPEATS
        self.is_closed = False
        self.update()
        with _all_lock:
            _pools.add(self)

    # Members.

    def update(self) -> None:
        """Ask the source which servers there are. Raises InvalidRequestError if there are none yet."""
        try:
            urls = self._source.urls()
            added = {url: Member(self._make(url)) for url in urls if url not in self._members}
        except (OSError, ValueError) as error:
            if self._members:
                logger.warning("pool: servers: %s; keeping those of before", error)
                return
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"url: expected servers, got: {error}") from error
        with self._lock:
            gone = [member for url, member in self._members.items() if url not in urls]
            if gone or added:
                self._members = {url: self._members.get(url) or added[url] for url in urls}
            for member in gone:
                member.is_gone = True
            self._last = {layer: last for layer, last in self._last.items() if not last.is_gone}
        for member in gone:
            logger.info("pool: server %s has gone from the list", member.url)
            if not member.begun:
                run(member.server.close())

    @property
    def transport(self) -> TransportName:
        """The transport of the first server."""
        return self.members[0].server.transport

    @property
    def is_local(self) -> bool:
        """Whether one of the servers is on this machine."""
        return any(member.server.is_local for member in self.members)

    @property
    def members(self) -> list[Member]:
        """The members at present."""
        return list(self._members.values())

    def states(self) -> list[ServerState]:
        """What is known of all."""
        now = self._clock()
        with self._lock:
            return [
                ServerState(
                    member.url,
                    member.state,
                    member.reason,
                    len(member.begun),
                    max((member.expected(size, now) for size in member.seconds), default=0.0),
                    dict(member.ended),
                )
                for member in self._members.values()
            ]

    def waits(self, member: Member, seconds: float) -> bool:
        """Whether a call has waited for this member for so long, or until its time had passed; told once."""
        with self._lock:
            was_late, member.is_late = member.is_late, False
            now = self._clock()
            return was_late or now - member.waits_since(now) > seconds

    def mark(self, member: Member, state: State, reason: str = "") -> None:
        """A member is up, draining or down from now on."""
        with self._lock:
            if member.state == state:
                return
            member.state, member.reason = state, reason
            if state == "up":
                member.layers.clear()  # it may have been started with others
        log = logger.info if state == "up" else logger.warning
        log("pool: server %s is %s%s", member.url, state, f": {reason}" if reason else "")

    def untold(self, member: Member) -> list[str]:
        """The models of which a member has not said whether it has them: it was added, or is back.

        Calls ask, but not those of open channels, which may have to leave another server for this one.
        """
        with self._lock:
            return sorted(self._models - member.layers.keys())

    def tell(self, member: Member, model: str, told: ModelMetadata | None) -> None:
        """What a member has of a model; None: nothing."""
        with self._lock:
            member.layers[model] = told, self._clock()
            if told is not None:
                self._models.add(model)

    def can_do_without(self, member: Member) -> bool:
        """Whether all layers that calls have asked a member for are at another one that is up."""
        with self._lock:
            others = [other for other in self.members if other is not member and other.state == "up"]
            asked = [(model, told.local_experts) for model, (told, _) in member.layers.items() if told]
            held = {
                (model, told.local_experts)
                for other in others
                for model, (told, _) in other.layers.items()
                if told
            }
        return bool(others) and all({(model, part), (model, None)} & held for model, part in asked)

    # Calls.

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        """Have a call answered by those who have its layer's experts."""
        self.on_call()
        try:
            yield from with_retries(
                lambda: self._by_present_owners(call, deadline), self._max_retries, deadline
            )
        except ExpertError as error:
            with _all_lock:
                _failures[outcome_of(error)] += 1
            raise

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
        """See `Asker.request`: of the first server that answers; a channel, of one that may have it."""

        def ask() -> Steps[Any]:
            members = self.members
            if path.startswith(_CHANNELS):
                members = yield from self._with_channels(body, deadline)
            failed: ExpertError | None = None
            for member in sorted(members, key=lambda member: member.state != "up"):
                try:
                    steps = member.server.request(method, path, deadline.once(), body)
                    answer = yield from self._asked(member, steps)
                except (ServerUnreachableError, ServerBusyError, UnknownModelError) as error:
                    failed = self._failed(member, error)
                else:
                    if path.startswith(_CHANNELS) and isinstance(answer, dict):
                        member.opened = answer
                    return answer
            assert failed is not None
            raise failed

        return with_retries(ask, self._max_retries, deadline)

    def channel_opened(self, opened: Any, link: ChannelClient) -> None:
        """See `Asker.channel_opened`: it ends when its server hangs."""
        with self._lock:
            for member in self._members.values():
                if member.opened is opened:
                    member.links[link] = 0, 0.0

    def _with_channels(self, body: Any, deadline: Deadline) -> Steps[list[Member]]:
        """Those that may have a channel as `body` wants, to all experts of its layers: on this machine, or
        over NIXL.
        """
        is_anywhere = isinstance(body["memory"], dict) and "nixl" in body["memory"]
        members = [member for member in self.members if is_anywhere or member.server.is_local]
        if not members:
            raise TransportUnavailableError("pool: expected a server on this machine, got others")
        for model in body["models"] if "models" in body else [body["model"]]:
            known = yield from self._known(model, deadline)
            members = [each for each in members if each not in known or known[each].local_experts is None]
            if not members:
                text = f"expected all experts of {model} at a server on this machine, got parts of them"
                raise TransportUnavailableError(f"pool: {text}")
        return members

    def each(self, method: str, path: str, deadline: Deadline) -> Steps[list[Any]]:
        """What every server answers that can be reached. Raises what the last says if none can."""
        found: list[Any] = []
        failed: ExpertError | None = None
        for member in self.members:
            try:
                steps = member.server.request(method, path, deadline.once())
                found.append((yield from self._asked(member, steps)))
            except (ServerUnreachableError, ServerBusyError, DeadlineError, UnknownModelError) as error:
                failed = error
        if not found and failed is not None:
            raise failed
        return found

    def _asked(self, member: Member, steps: Steps[T]) -> Steps[T]:
        """What a member answers; if it hangs, that is found out as of an infer call."""
        self.on_call()
        token = object()
        with self._lock:
            if member.is_gone:
                raise ServerUnreachableError(f"server {member.url}: expected it in the list, got it gone")
            member.begun[token] = self._clock()
        try:
            return (yield from member.asked(steps))
        except DeadlineError:
            with self._lock:
                member.is_late = True
            raise
        except AccessDeniedError as error:
            raise _denied(member, error) from error
        finally:
            self._end(member, token)

    def check_ready(self, model: str, deadline: Deadline) -> Steps[None]:
        """Raises what servers say if a layer, or a part of its experts, is ready at none of them."""
        known = yield from self._known(model, deadline)
        for members in owners_of(model, known).values():
            failed: ExpertError | None = None
            for member in members:
                try:
                    yield from self._asked(member, member.server.check_ready(model, deadline))
                    break
                except (ServerUnreachableError, ServerBusyError, UnknownModelError) as error:
                    failed = self._failed(member, error, model)
            else:
                assert failed is not None
                raise failed

    def metadata(self, model: str, deadline: Deadline) -> Steps[ModelMetadata]:
        """Of a layer, as all servers that have it say. Raises UnknownModelError, InvalidRequestError."""
        known = yield from self._known(model, deadline)
        told = next(iter(known.values()))
        includes = any(each.shared_experts == "included" for each in known.values())
        shared = "included" if includes else told.shared_experts
        return replace(told, local_experts=None, shared_experts=shared)

    def close(self) -> Steps[None]:
        """Close all servers' connections."""
        self.is_closed = True
        for member in self.members:
            yield from member.server.close()

    def _by_present_owners(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        while True:
            try:
                return (yield from self._by_owners(call, deadline))
            except _GoneError:
                continue

    def _by_owners(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        known = yield from self._known(call.model, deadline)
        owners = owners_of(call.model, known)
        if len(owners) == 1:
            ((experts, members),) = owners.items()
            return (yield from self._by_one(call, experts, members, deadline))
        yield from split(
            call,
            [
                ExpertOwner(
                    experts or frozenset(),
                    known[members[0]].shared_experts == "included",
                    partial(self._by_one, experts=experts, members=members, deadline=deadline),
                )
                for experts, members in owners.items()
            ],
        )

    def _by_one(
        self, call: LayerCall, experts: frozenset[int] | None, members: Sequence[Member], deadline: Deadline
    ) -> Steps[None]:
        """Have the best of the members that have the same experts answer, and others if it does not."""
        size = call.shape[0].bit_length()
        self._repeats = min(_FIRST_REPEATS, self._repeats + _REPEATS)
        left, failed = list(members), None
        while left:
            member, token = self._choose((call.model, experts), left, size)
            left.remove(member)
            began = self._clock()
            outcome: Outcome | None = None
            try:
                yield from member.asked(member.server.infer(call, deadline.once()))
            except (ServerUnreachableError, ServerBusyError, UnknownModelError) as error:
                outcome = outcome_of(error)
                failed = self._failed(member, error, call.model)
                if isinstance(error, ServerBusyError):
                    now = self._clock()
                    with self._lock:  # it would take at least as long
                        member.took(size, max(now - began, error.retry_after or 0.0), now)
                    if error.retry_after is None and is_late(error):
                        raise
            except DeadlineError:
                outcome = "timeout"
                now = self._clock()
                with self._lock:
                    member.took(size, now - began, now)
                    member.is_late = True
                raise
            except AccessDeniedError as error:
                outcome = "error"
                raise _denied(member, error) from error
            except ExpertError:
                outcome = "error"
                raise
            else:
                outcome = "answered"
                now = self._clock()
                with self._lock:
                    member.took(size, now - began, now)
                return
            finally:
                self._end(member, token, outcome)
            if left and isinstance(failed, ServerBusyError) and failed.retry_after is not None:
                self._repeats -= 1
                if self._repeats < 0:
                    self._repeats = 0.0
                    break
        assert failed is not None
        raise failed

    def _choose(
        self, layer: tuple[str, frozenset[int] | None], members: Sequence[Member], size: int
    ) -> tuple[Member, object]:
        """The one that will likely be done first, of two.

        Also what `_end` gets, which must follow.
        """
        now, token = self._clock(), object()
        with self._lock:
            member = self._best(layer, members, size, now)
            member.begun[token] = now
            self._last[layer] = member
        return member, token

    def _end(self, member: Member, token: object, outcome: Outcome | None = None) -> None:
        """A call has ended; None: it counts nowhere."""
        with self._lock:
            member.begun.pop(token, None)
            if outcome is not None:
                member.ended[outcome] += 1
            is_last = member.is_gone and not member.begun
        if is_last:
            run(member.server.close())

    def _best(
        self, layer: tuple[str, frozenset[int] | None], members: Sequence[Member], size: int, now: float
    ) -> Member:
        kept = [member for member in members if not member.is_gone]
        if not kept:
            raise _GoneError
        up = [member for member in kept if member.state == "up"] or kept
        return self._better(up, self._last.get(layer), size, now)

    def _better(self, up: Sequence[Member], last: Member | None, size: int, now: float) -> Member:
        """Of the last one and another at random, or of two at random, the one that will likely be done first.

        Of all, it would be the one of which least is known, and of new ones at once for all clients.
        """
        if last is not None and last in up and size in last.seconds:
            other = random.choice([member for member in up if member is not last] or [last])
            return other if other.expected(size, now) < _STAYS * last.expected(size, now) else last
        some = random.sample(up, min(2, len(up)))
        return min(some, key=lambda member: (member.expected(size, now), len(member.begun)))

    def _failed(self, member: Member, error: ExpertError, model: str | None = None) -> ExpertError:
        """What a member's error says of it."""
        outcome = outcome_of(error)
        if outcome == "unknown_model" and model is not None:
            self.tell(member, model, None)
        elif outcome == "unreachable":
            self.mark(member, "down", str(error))
        elif outcome == "draining":
            self.mark(member, "draining", str(error))
        return error

    def _known(self, model: str, deadline: Deadline) -> Steps[dict[Member, ModelMetadata]]:
        """Who has a layer, of those that are not down. Raises UnknownModelError, ServerUnreachableError."""
        found: dict[Member, ModelMetadata] = {}
        failed: ExpertError | None = None
        members = self.members
        for member in [each for each in members if each.state != "down"] or members:
            told, at = member.layers.get(model, (None, -math.inf))
            is_known = told is not None and told.weights_id is not None
            if not is_known and self._clock() - at > _UNKNOWN_SECONDS:
                limit = Deadline(min(self.failover_seconds, deadline.check()))
                try:
                    told = yield from self._asked(member, member.server.metadata(model, limit))
                except UnknownModelError as error:
                    failed = failed or error
                except DeadlineError as error:
                    deadline.check()  # else it is the call that has no time
                    self.mark(member, "down", str(error))
                    failed = ServerUnreachableError(f"server {member.url}: {error}")
                    continue
                except (ServerUnreachableError, ServerBusyError) as error:
                    failed = self._failed(member, error)
                    continue
                self.tell(member, model, told)
            if told is not None:
                found[member] = told
        if not found:
            if any(member.is_gone for member in members):
                return (yield from self._known(model, deadline))
            raise failed or UnknownModelError(f"model {model}: expected a server that has it, got none")
        check_same(model, found)
        return found


def _denied(member: Member, error: AccessDeniedError) -> AccessDeniedError:
    """Keys may differ from server to server."""
    return AccessDeniedError(f"server {member.url}: {error}", error.status)


_pools: "weakref.WeakSet[ServerPool]" = weakref.WeakSet()
_failures: Counter[str] = Counter()
_all_lock = threading.RLock()  # of both; for its kind, see ServerPool


def pools() -> list[ServerPool]:
    """The open pools of this process."""
    with _all_lock:
        return [pool for pool in _pools if not pool.is_closed]


def failures() -> dict[str, int]:
    """Infer calls that no server of a pool has answered, by what the last one said; of closed pools, too."""
    with _all_lock:
        return dict(_failures)


def _forget_in_child() -> None:
    """A lock may have been held by another thread, and calls are the parent's."""
    global _all_lock
    _all_lock = threading.RLock()
    _failures.clear()
    for pool in list(_pools):
        pool._lock = threading.RLock()
        for member in pool.members:
            member.begun = {}
            member.ended.clear()


os.register_at_fork(after_in_child=_forget_in_child)
