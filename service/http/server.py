"""Runs the application on uvicorn, and turns SIGTERM into a drain that loses no accepted request."""

import asyncio
import errno
import logging
import os
import socket
from types import FrameType

import uvicorn

from expertd.service.engine.engine import Phase
from expertd.service.http.app import ExpertApp
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_BACKLOG = 2048


class BindError(Exception):
    """The host and port cannot be listened on; the text says why."""


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0 after a full drain, else 1.

    Raises BindError before anything is loaded when the port cannot be had.
    """
    listener = listen(settings.host, settings.port)
    app = ExpertApp(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_seconds)),
    )
    server = _Server(config, app)
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    server.run(sockets=[listener])
    return server.exit_code


class _Server(uvicorn.Server):
    """A signal ends readiness at once, connections only when every accepted request has its answer."""

    def __init__(self, config: uvicorn.Config, app: ExpertApp) -> None:
        super().__init__(config)
        self.exit_code = 1
        self._app = app
        self._engine = app.engine
        self._signals = 0
        self._drain: asyncio.Task[bool] | None = None
        self._drain_by = 0.0  # the event loop's time by which drain_timeout_seconds are over

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's: it raises the signal again after its shutdown, and the exit code would not be 0.
        self._signals += 1
        self._engine.begin_drain()
        if self._signals > 1:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._engine.phase is Phase.FAILED:
            return True
        if self._signals and self._drain is None:
            logger.info("shutting down: accepted requests are answered first")
            settings = self._engine.settings
            wait = settings.shutdown_delay_seconds + settings.drain_timeout_seconds
            self._drain_by = asyncio.get_running_loop().time() + wait
            self._drain = asyncio.create_task(self._engine.drain())
        if self._drain is not None and self._drain.done():
            self.exit_code = 0 if self._drain.result() else 1
            self._app.stop_reading()
            # What is left is to send the answers, in the same time: not in as much again.
            left = self._drain_by - asyncio.get_running_loop().time()
            self.config.timeout_graceful_shutdown = max(1, round(left))
            return True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises BindError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # asyncio and socket wrap the reason in their own words; the number says it plainly.
        known = error.errno in errno.errorcode
        reason = os.strerror(error.errno or 0) if known else error.strerror
        raise BindError(f"port: expected a free address, got {host}:{port}: {reason}") from error
    listener.set_inheritable(False)
    return listener
