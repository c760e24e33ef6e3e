"""Looks after a pool's servers: who hangs, who is back, and whether there are others."""

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, ServerBusyError
from expertd_client.pool import Member, ServerPool
from expertd_client.server import Server, ServerOptions
from expertd_client.sources import Source
from expertd_client.steps import run_async

_LOOKS = 10  # within `failover_seconds`
_PATIENCE = 0.25  # of `failover_seconds`: that a call may take before its server is asked whether it lives
_HEARTBEAT = 0.5  # of `failover_seconds`: that the answer to that may take
_BACK_SECONDS = 0.25  # until a server that is not up is asked again
_UPDATE_SECONDS = 1.0  # between two looks at the list of servers


def watched(source: Source, settings: ServerOptions, failover_seconds: float) -> ServerPool:
    """A pool, which is looked after from its first call on."""
    # A server that is full is not waited for: another one may have room.
    of_server = replace(settings, max_retries=0, connect_seconds=failover_seconds)
    pool = ServerPool(source, lambda url: Server(url, of_server), failover_seconds, settings.max_retries)
    pool.on_call = Watch(pool, lambda url: Server(url, replace(of_server, transport="http"))).wake
    return pool


class Watch:
    """A thread while the pool has calls or servers that are not up; `wake` starts it.

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
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        tasks: dict[Member, asyncio.Task[None]] = {}
        probes: dict[Member, Server] = {}
        updated = time.monotonic()
        while (pool := self._pool()) is not None and not pool.is_closed:
            seconds = pool.failover_seconds / _LOOKS
            if time.monotonic() - updated > _UPDATE_SECONDS:
                await asyncio.to_thread(pool.update)
                updated = time.monotonic()
            members = pool.members
            for member in members:
                if (task := tasks.get(member)) is not None and not task.done():
                    continue
                if self._is_due(pool, member):
                    if member not in probes:
                        probes[member] = self._probe_of(member.url)
                    tasks[member] = asyncio.create_task(_probe(pool, member, probes[member]))
            for gone in [member for member in probes if member not in members]:
                await run_async(probes.pop(gone).close())
            del pool
            await asyncio.sleep(seconds)
        for probe in probes.values():
            await run_async(probe.close())

    def _is_due(self, pool: ServerPool, member: Member) -> bool:
        """Whether a member should say how it is."""
        if member.state != "up":
            return True
        oldest = pool.oldest(member)
        return oldest is not None and time.monotonic() - oldest > _PATIENCE * pool.failover_seconds


async def _probe(pool: ServerPool, member: Member, probe: Server) -> None:
    """Ask a member that is up whether it lives, and one that is not, whether it is ready."""
    was_up = member.state == "up"
    path = "/v2/health/live" if was_up else "/v2/health/ready"
    seconds = _HEARTBEAT * pool.failover_seconds
    try:
        await run_async(probe.request("GET", path, Deadline(seconds)))
    except ServerBusyError as error:
        pool.mark(member, "draining", str(error))
    except ExpertError as error:
        pool.mark(member, "down", f"no heartbeat within {seconds:g} s: {error}")
        if pool.can_do_without(member):  # else calls had better wait
            member.server.break_off()
    else:
        pool.mark(member, "up")
    if not was_up:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(_BACK_SECONDS)
