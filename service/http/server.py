"""Runs the application on uvicorn. SIGTERM starts a drain that answers every accepted request."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from expertd.service.engine.engine import Phase
from expertd.service.engine.loading import Loader, load
from expertd.service.http.app import ExpertApp
from expertd.service.http.connection import Connection
from expertd.service.http.listening import BindError, Listener, allow_files, listen
from expertd.service.http.refused import RefusedError
from expertd.service.http.shared import ServerState, Shared
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_OTHER_FILES = 256  # besides connections: lingering ones, libraries, devices
_FLUSH_SECONDS = 0.1  # to send the last responses before the process exits immediately


def serve(settings: Settings, loader: Loader = load) -> int:
    """Serve what `loader` loads until SIGTERM, SIGINT or SIGHUP.

    Returns the exit code: 0 after a full drain, else 1. Raises BindError, before anything is loaded, if it
    cannot listen.
    """
    listener = listen(settings)
    app = ExpertApp(settings, loader)
    if app.listener is not None:
        try:
            app.listener.bind()
        except OSError as error:
            listener.close()
            raise BindError(str(error)) from error
    shared = Shared(app, app.infer, app.metrics, settings)

    def connection(
        config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], _loop: object = None
    ) -> Connection:
        return Connection(shared, server_state, app_state)

    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=connection,  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        server_header=False,
        proxy_headers=False,
    )
    region_files = 2 * settings.shared_memory.max_regions  # the file, and its mapping's own descriptor
    allow_files(settings.limits.max_connections + region_files + _OTHER_FILES)
    server = _Server(config, app, shared, listener)
    logger.info("listening on %s", listener.address)
    try:
        server.run(sockets=[listener.socket])
    finally:
        listener.remove()
    if app.engine.scheduler.running:
        _exit(server.exit_code)  # a normal exit would abort while the thread is in native code
    return server.exit_code


class _Server(uvicorn.Server):
    """A signal ends readiness at once; connections end after every accepted request is answered."""

    def __init__(self, config: uvicorn.Config, app: ExpertApp, shared: Shared, listener: Listener) -> None:
        super().__init__(config)
        self._listener = listener
        self.exit_code = 1
        self._app = app
        self._shared = shared
        self._cut_off_before = 0  # connections that were cut off before the drain
        self._engine = app.engine
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[bool] | None = None
        self._drain_by = 0.0  # when drain_timeout_seconds end, in the event loop's time

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        hangup = signal.getsignal(signal.SIGHUP)
        if hangup is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(signal.SIGHUP, hangup)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Replaces uvicorn's handler, which raises the signal again after shutdown, so the exit code is not 0.
        self._signals += 1
        if self._signals == 1:
            self._cut_off_before = self._shared.cut_off
        self._engine.begin_drain()
        if self._signals == 2:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(
                self._end_now, "the server was stopped before the response was ready"
            )
        elif self._signals > 2:
            self._exit_now()

    async def on_tick(self, counter: int) -> bool:
        settings = self._engine.settings
        now = asyncio.get_running_loop().time()
        if self._engine.phase is Phase.FAILED:
            return self._finish(settings.drain_timeout_seconds)
        if self._signals and self._drain is None:
            logger.info("shutting down after all accepted requests are answered")
            self._drain_by = now + settings.shutdown_delay_seconds + settings.drain_timeout_seconds
            self._drain = asyncio.create_task(self._engine.drain())
        if self._drain is not None and self._drain.done():
            self.exit_code = 0 if self._drain.result() else 1
            # The responses still have to be sent, within the same timeout.
            return self._finish(self._drain_by - now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if cut_off := self._shared.cut_off - self._cut_off_before:
            logger.error("connections closed before their responses were read: %d", cut_off)
            self.exit_code = 1

    def _finish(self, seconds: float) -> bool:
        """Let connections close within `seconds`, at least one; always True."""
        self._app.stop_reading()
        for connection in self._connections():
            connection.stop_reading()
        asyncio.get_running_loop().call_later(max(1.0, seconds), self._end_late)
        return True

    def _end_late(self) -> None:
        if not (self.server_state.connections or self.server_state.tasks):
            return
        pending = sum(connection.has_pending_output for connection in self._connections())
        logger.error("connections with unsent or unread responses, closed now: %d", pending)
        self._end_now("the server is shutting down")

    def _end_now(self, text: str) -> None:
        for connection in self._connections():
            connection.stop(RefusedError(503, text))
        asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._exit_now)

    def _exit_now(self) -> None:
        self._listener.remove()
        _exit(1)

    def _connections(self) -> list[Connection]:
        return [
            connection for connection in self.server_state.connections if isinstance(connection, Connection)
        ]


def _exit(code: int) -> NoReturn:
    """Exit at once, without waiting for a thread that is in a step."""
    logging.shutdown()
    os._exit(code)
