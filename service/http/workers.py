"""The HTTP processes of a server: starts them, hands each a channel, replaces those that die, ends them."""

import asyncio
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import IO

from expertd.service.channels.hub import Entry
from expertd.service.channels.listener import hand_over
from expertd.service.channels.opening import Opening
from expertd.service.http.app import ExpertApp
from expertd.service.http.certificates import Certificates
from expertd.service.http.listening import Listener, engine_socket
from expertd.service.http.worker_setup import (
    DRAIN,
    FINISH,
    LEVEL,
    STOP,
    SharedCounts,
    WorkerSetup,
    channel_sizes,
    shares,
)
from expertd.service.inference.gate import KeyFile
from expertd.service.settings.keys import Keys
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import TlsSettings
from expertd.service.settings.served import ModelSettings

logger = logging.getLogger(__name__)

_MODULE = "expertd.service.http.worker"
_STEADY_SECONDS = 10.0  # a process that lived for this long is replaced at once
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0  # seconds before others are, doubled each time
_GRACE_SECONDS = 2.0  # beyond its time, before a process that does not end is killed


class Workers:
    """`settings.http_workers` processes that accept connections on `public`, and check keys.

    engine_settings  those of the server in this process, which listens on `engine_listener`, a private socket

    Raises BindError if that socket cannot be made, SettingsError for a file of keys, or files of
    TLS, that cannot be used.
    """

    def __init__(self, settings: Settings, public: Listener) -> None:
        self._keys = None if settings.keys is None else KeyFile(settings.keys)
        self._certificates = Certificates(settings.tls) if settings.tls.is_on else None
        self._public = public
        self._public.socket.setblocking(False)
        self._count = settings.http_workers
        self._settings = shares(settings).model_copy(update={"models": _plain(settings)})
        self._counts_file = os.memfd_create("expertd-counts", os.MFD_CLOEXEC)
        self._counts = SharedCounts(self._counts_file, self._count, len(settings.models))
        self._processes: dict[int, _Process] = {}  # by index
        self._reached: set[int] = set()  # the processes that have had a channel, also if they were replaced
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._finish_by: float | None = None
        self.succeeded = True  # no process has failed during the drain
        # Last: if anything before fails, no folder is left.
        self._stack = ExitStack()
        self._engine_path, self.engine_listener = self._stack.enter_context(engine_socket())
        update = {"uds": self._engine_path, "keys": None, "tls": TlsSettings()}
        memory = {"max_buffered_bytes": self._settings.buffered_bytes}
        limits = settings.limits.model_copy(update=memory)
        self.engine_settings = settings.model_copy(update={**update, "limits": limits})

    def start(self, app: ExpertApp) -> None:
        """Start the processes, on the running event loop."""
        app.pass_on_log_level = self.set_log_level
        app.engine.can_be_reached = lambda: len(self._reached) == self._count
        app.engine.share_counts(self._counts.queues(None))
        for index in range(self._count):
            app.metrics.add_process(self._counts.requests(index), self._counts.keys(index))
            buffered = self._counts.buffered(index)
            app.metrics.watch_buffered(str(index), partial(buffered.__getitem__, 0))
            self._counts.connections[index] = math.inf
            self._tasks.append(asyncio.get_running_loop().create_task(self._keep(app, index)))

    def refresh_files(self) -> Keys | None:
        """Know the present keys and certificates, which a process begins with; the keys, if there are any."""
        if self._certificates is not None:
            self._certificates.refresh()
        return None if self._keys is None else self._keys.current()

    def drain(self) -> None:
        """Have connections end after their next answers; safe in a signal handler."""
        self._is_ending = True
        self._tell(DRAIN)

    def set_log_level(self, level: str) -> None:
        """Have the processes, and those that replace them, log lines of this level and above."""
        self._settings = self._settings.model_copy(update={"log_level": level})
        self._tell(LEVEL + level.encode())

    def finish(self, seconds: float) -> bool:
        """Have the processes answer what they have, and end, within `seconds`; True once they have."""
        now = time.monotonic()
        if self._finish_by is None:
            self._is_ending = True
            self._public.close()  # the last one closed refuses new connections
            self._finish_by = now + max(1.0, seconds) + _GRACE_SECONDS
            self._tell(FINISH + str(max(1.0, seconds)).encode())
        if now > self._finish_by:
            for process in self._processes.values():
                process.kill()
        return not self._processes

    def stop(self) -> None:
        """Have the processes end at once."""
        self._is_ending = True
        self._tell(STOP)

    def close(self) -> None:
        """End what is left: a process ends when its connection to this one does."""
        self._is_ending = True
        for process in self._processes.values():
            process.connection.close()
        self._stack.close()

    def _tell(self, message: bytes) -> None:
        for process in list(self._processes.values()):
            process.tell(message)

    async def _keep(self, app: ExpertApp, index: int) -> None:
        """Keep one process running."""
        pause = _FIRST_PAUSE
        while not self._is_ending:
            started = time.monotonic()
            try:
                code = await self._run(app, index)
            except OSError as error:
                logger.error("HTTP process %d cannot be started: %s", index, error)
            else:
                if self._is_ending:
                    # By SIGTERM a process ends only as long as it has accepted nothing.
                    if code not in (0, -signal.SIGTERM):
                        logger.error("HTTP process %d ended with exit code %d", index, code)
                        self.succeeded = False
                    return
                logger.error("HTTP process %d ended with exit code %d: starting another", index, code)
            pause = (
                _FIRST_PAUSE if time.monotonic() - started > _STEADY_SECONDS else min(2 * pause, _LAST_PAUSE)
            )
            await asyncio.sleep(pause)

    async def _run(self, app: ExpertApp, index: int) -> int:
        """Run a process until it ends; returns its exit code. Raises OSError."""
        loop = asyncio.get_running_loop()
        process = self._processes[index] = self._start(index, app.engine.loaded is not None)
        handing = loop.create_task(self._hand_over(process, app, index))
        try:
            with suppress(ConnectionError):
                await loop.sock_recv(process.connection, 1)  # it sends nothing: this is its end
        finally:
            self._counts.connections[index] = math.inf
            handing.cancel()
            process.kill()
            code = await asyncio.to_thread(process.popen.wait)
            self._counts.queues(index).clear()
            self._counts.buffered(index)[0] = 0.0
            process.close(app)
            del self._processes[index]
        return code

    async def _hand_over(self, process: "_Process", app: ExpertApp, index: int) -> None:
        """Give a process its channel as soon as the engine has loaded."""
        await app.engine.wait_loaded()
        if app.engine.loaded is None:
            return
        try:
            await process.hand_over(app, self._settings)
        except Exception:
            logger.exception("HTTP process %d gets no channel", index)
            process.kill()
        else:
            self._reached.add(index)

    def _start(self, index: int, waits: bool) -> "_Process":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup_descriptor = os.memfd_create("expertd-setup", os.MFD_CLOEXEC)  # it may have a private key
        with theirs, os.fdopen(setup_descriptor, "w+b") as setup_file:
            setup = WorkerSetup.model_construct(
                settings=self._settings,
                engine=self._engine_path,
                index=index,
                num_processes=self._count,
                waits=waits,
                control=theirs.fileno(),
                listener=self._public.socket.fileno(),
                counts=self._counts_file,
                keys=None if self._keys is None else self._keys.current().keys,
                tls=None if self._certificates is None else self._certificates.files,
            )
            setup_file.write(setup.model_dump_json().encode())
            setup_file.seek(0)
            try:
                return _Process(ours, setup_file, (setup.control, setup.listener, setup.counts))
            except OSError:
                ours.close()
                raise


class _Process:
    """One HTTP process, and the connection that is its life."""

    def __init__(self, connection: socket.socket, setup: IO[bytes], descriptors: tuple[int, ...]) -> None:
        connection.setblocking(False)
        self.connection = connection
        # A process group of its own: Ctrl-C is for this process, which tells the others.
        command = [sys.executable, "-P", "-m", _MODULE]
        self.popen = subprocess.Popen(command, stdin=setup, pass_fds=descriptors, process_group=0)
        self._entry: Entry | None = None

    async def hand_over(self, app: ExpertApp, settings: Settings) -> None:
        """Open the process's channel. Raises OSError, RuntimeError."""
        num_slots, num_bytes = channel_sizes(settings)
        models = tuple(model.name for model in settings.models)
        opening = Opening(models, num_slots, settings.limits.max_request_tokens, memory=num_bytes)
        entry = self._entry = await app.channels.open_ours(opening)
        assert entry.token is not None
        channel = app.channels.claim(entry.token, self.popen.pid, self.kill)
        assert channel is not None
        hand_over(self.connection, channel)

    def tell(self, message: bytes) -> None:
        """Send a message; a process that is gone, or reads none, is ended otherwise."""
        with suppress(OSError):
            self.connection.send(message)

    def kill(self) -> None:
        """End the process, if it runs."""
        self.popen.kill()

    def close(self, app: ExpertApp) -> None:
        """Free the channel of a process that has ended."""
        self.connection.close()
        entry, self._entry = self._entry, None  # it refers to this object: a circle would keep the memory
        if entry is not None:
            app.channels.close(entry.channel, "its HTTP process has ended")


def _plain(settings: Settings) -> tuple[ModelSettings, ...]:
    """The models without the sources of their weights."""
    names = set(ModelSettings.model_fields) - {"weights", "partition"}
    return tuple(ModelSettings(**model.model_dump(include=names)) for model in settings.models)
