"""What all processes of a server share: uvicorn with our protocol, and how its connections end."""

import asyncio
import logging
import os
import socket
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp

from expertd.service.http.certificates import Certificates
from expertd.service.http.connection import HttpConnection
from expertd.service.http.responses import BROWSER_HEADERS, RefusedError
from expertd.service.http.server_context import ServerContext, UvicornState
from expertd.service.http.tls import TlsProtocol

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.1  # to send the last responses before the process exits immediately
STOPPED = "the server was stopped before the response was ready"


class ConnectionServer(uvicorn.Server):
    """Ends its connections after the answers to what was received, within a time, or at once.

    exit_code  of the process; set by the subclass, and to 1 if a client has not read its response
    """

    def __init__(
        self,
        app: ASGIApp,
        context: ServerContext,
        stop_reading: Callable[[], None],
        lifespan: bool,
        certificates: Certificates | None,
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=self._protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="on" if lifespan else "off",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            headers=list(BROWSER_HEADERS),
        )
        super().__init__(config)
        self.exit_code = 1
        self._context = context
        self._stop_reading = stop_reading
        self._certificates = certificates  # None: without TLS
        self._cut_off_before = 0  # connections that were cut off before the drain

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; True to end the server."""
        self._context.endpoint.gate.refresh()
        if self._certificates is not None:
            self._certificates.refresh()
        return await super().on_tick(counter)

    @abstractmethod
    def exit_now(self) -> None:
        """End the process."""

    def begin_drain(self) -> None:
        """Count connections that are cut off from now on."""
        self._cut_off_before = self._context.cut_off

    def finish(self, seconds: float) -> bool:
        """Let connections close within `seconds`, at least one; always True."""
        self._stop_reading()
        for connection in self._connections():
            connection.stop_reading()
        asyncio.get_running_loop().call_later(max(1.0, seconds), self._end_late)
        return True

    def end_now(self, text: str, flush_seconds: float = FLUSH_SECONDS) -> None:
        """Answer 503 with `text` to everybody who waits, and exit."""
        for connection in self._connections():
            connection.stop(RefusedError(503, text))
        asyncio.get_running_loop().call_later(flush_seconds, self.exit_now)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, and count those whose clients have not read their responses."""
        await super().shutdown(sockets)
        if cut_off := self._context.cut_off - self._cut_off_before:
            logger.error("connections closed before their responses were read: %d", cut_off)
            self.exit_code = 1

    def new_protocol(self, state: UvicornState, app_state: dict[str, Any]) -> asyncio.BufferedProtocol:
        """The protocol of a new connection."""
        if self._certificates is None:
            return HttpConnection(self._context, state, app_state)
        make = partial(HttpConnection, self._context, state, app_state, is_admitted=True)
        return TlsProtocol(self._context, state, self._certificates.context, make)

    def _protocol(
        self,
        config: uvicorn.Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: object = None,
    ) -> asyncio.BufferedProtocol:
        return self.new_protocol(server_state, app_state)

    def _end_late(self) -> None:
        if not (self.server_state.connections or self.server_state.tasks):
            return
        pending = sum(connection.has_pending_output for connection in self._connections())
        logger.error("connections with unsent or unread responses, closed now: %d", pending)
        self.end_now("the server is shutting down")

    def _connections(self) -> list[HttpConnection]:
        return [
            connection
            for connection in self.server_state.connections
            if isinstance(connection, HttpConnection)
        ]


def exit_process(code: int) -> NoReturn:
    """Exit at once, without waiting for a thread that is in a step."""
    logging.shutdown()
    os._exit(code)
