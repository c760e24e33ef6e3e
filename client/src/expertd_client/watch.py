"""Looks after a pool's servers: who hangs, who is back, and whether there are others."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from expertd_client.deadline import Deadline
from expertd_client.errors import DeadlineError, ExpertError, ServerBusyError, ServerUnreachableError
from expertd_client.pool import Member, ServerPool, State
from expertd_client.server import Server, ServerOptions
from expertd_client.sources import UrlSource
from expertd_client.steps import run

_LOOKS = 20  # within `failover_seconds`
_LOOK_SECONDS = 0.25  # between two looks, at most
_PATIENCE = 0.1  # of `failover_seconds`: that a call may take before its server is asked whether it lives
_HEARTBEAT = 0.5  # of `failover_seconds`: that the answer to that may take
_BETWEEN = 0.25  # of `failover_seconds`: between two such questions, which all callers of a long step ask
_BACK_SECONDS = 0.25  # until a server that is not up is asked again
_UPDATE_SECONDS = 1.0  # between two looks at the list of servers


def watched(source: UrlSource, settings: ServerOptions, failover_seconds: float) -> ServerPool:
    """A pool, which is looked after from its first call on."""
    # A server that is full is not waited for: another one may have room.
    of_server = replace(settings, max_retries=0, connect_seconds=failover_seconds)
    pool = ServerPool(source, lambda url: Server(url, of_server), failover_seconds, settings.max_retries)
    pool.on_call = Watch(pool, lambda url: Server(url, replace(of_server, transport="http"))).wake
    return pool


class Watch:
    """A thread from the pool's first call on, until that is closed or dropped; `wake` starts it.

    probe_of  connections to a member, for questions of the watch alone
    """

    def __init__(self, pool: ServerPool, probe_of: Callable[[str], Server]) -> None:
        self._pool = weakref.ref(pool)
        self._probe_of = probe_of
        self._lock = threading.Lock()
        self._process: int | None = None  # in which the thread runs

    def wake(self) -> None:
        """A call begins."""
        if self._process != os.getpid():
            with self._lock:
                if self._process != os.getpid():
                    self._process = os.getpid()
                    threading.Thread(target=self._run, name="expertd-pool", daemon=True).start()

    def _run(self) -> None:
        # Threads: an event loop has none for names to be looked up once the main thread has ended.
        probes: dict[Member, _Probe] = {}
        update: threading.Thread | None = None
        updated = time.monotonic()
        while (pool := self._pool()) is not None and not pool.is_closed:
            if time.monotonic() - updated > _UPDATE_SECONDS and not _is_alive(update):
                update = _begun(pool.update)
                updated = time.monotonic()
            members = pool.members
            for member in members:
                probe = probes.get(member)
                if self._is_due(pool, member, probe):
                    server = probe.server if probe else self._probe_of(member.url)
                    thread = _begun(_ask, self._pool, member, server, pool.failover_seconds)
                    probes[member] = _Probe(server, thread, time.monotonic())
            for gone in [member for member in probes if member not in members]:
                run(probes.pop(gone).server.close())
            seconds = min(_LOOK_SECONDS, pool.failover_seconds / _LOOKS)
            del pool
            time.sleep(seconds)
        for each in probes.values():
            run(each.server.close())

    def _is_due(self, pool: ServerPool, member: Member, last: "_Probe | None") -> bool:
        """Whether a member should say how it is."""
        if last is not None and _is_alive(last.thread):
            return False
        if member.state != "up":
            return True
        if last is not None and time.monotonic() - last.began < _BETWEEN * pool.failover_seconds:
            return False
        return pool.waits(member, _PATIENCE * pool.failover_seconds) or bool(pool.untold(member))


class _Probe(NamedTuple):
    """Of a member: the connections for questions to it, and the last question."""

    server: Server
    thread: threading.Thread | None
    began: float


def _begun(work: Callable[..., None], *arguments: Any) -> threading.Thread | None:
    """A thread that does something which may take a while; None: there can be none now."""
    thread = threading.Thread(target=work, args=arguments, name="expertd-probe", daemon=True)
    with suppress(RuntimeError):
        thread.start()
        return thread
    return None


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _ask(
    pool_of: Callable[[], ServerPool | None], member: Member, probe: Server, failover_seconds: float
) -> None:
    """Ask a member that is up whether it lives, and another one whether it is ready; then what it has."""
    was_up = member.state == "up"
    path = "/v2/health/live" if was_up else "/v2/health/ready"
    seconds = _HEARTBEAT * failover_seconds
    state: State = "up"
    reason = ""
    try:
        run(probe.request("GET", path, Deadline(seconds)))
    except ServerBusyError as error:
        state, reason = "draining", str(error)
    except ExpertError as error:
        state, reason = "down", f"no heartbeat within {seconds:g} s: {error}"
    pool = pool_of()
    if pool is not None and not (was_up and state == "up"):
        pool.mark(member, state, reason)
    if pool is not None and state == "down" and pool.can_do_without(member):  # else calls had better wait
        member.break_off()
    if pool is not None and state == "up":
        _learn(pool, member, probe, seconds)
    del pool  # it may be dropped meanwhile
    if not was_up:
        time.sleep(_BACK_SECONDS)


def _learn(pool: ServerPool, member: Member, probe: Server, seconds: float) -> None:
    """Ask a member for models of which it has said nothing yet."""
    for model in pool.untold(member):
        told = None
        try:
            told = run(probe.metadata(model, Deadline(seconds)))
        except (DeadlineError, ServerBusyError, ServerUnreachableError):
            return  # it is asked again
        except ExpertError:
            pass
        pool.tell(member, model, told)
