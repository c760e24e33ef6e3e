"""The gRPC server: where it listens, and when it starts and ends."""

import asyncio
import logging
import math

import grpc

from expertd.service.grpc.address import check_address
from expertd.service.grpc.credentials import credentials
from expertd.service.grpc.service import Service
from expertd.service.http.app import ExpertApp
from expertd.service.http.listening import BindError
from expertd.service.inference.gate import Gate, KeyFile
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_FRAMING_BYTES = 64 * 1024  # of a message beside its tensors, so that the protocol's own limit is the smaller
_MOST = 2**31 - 2  # of an option: connections must be below INT32_MAX, and a message has no more bytes
_FLUSH_SECONDS = 1.0  # for connections to close once all answers are sent


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Whether gRPC logs an error that is not merely a client that left while its answer was sent."""
    error = record.exc_info[0] if record.exc_info else None
    return error is None or error.__name__ != "ExecuteBatchError"


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_interest)


class GrpcServer:
    """Serves `app` on `host` and `grpc.port` of the settings; runs on the event loop of `start`.

    Raises BindError if it cannot listen there, and SettingsError for unusable files of keys or TLS.
    """

    def __init__(self, app: ExpertApp, settings: Settings) -> None:
        self._address = check_address(settings)  # before anything is loaded
        self._credentials = credentials(settings.tls) if settings.tls.is_on else None
        # In front of several HTTP processes, the application does not check keys itself.
        own = settings.http_workers > 1 and settings.keys is not None
        gate = Gate(KeyFile(settings.keys), app.metrics.keys) if own and settings.keys else app.gate
        self._max_bytes = min(settings.limits.max_body_bytes + _FRAMING_BYTES, _MOST)
        self._service = Service(app, gate, self._max_bytes)
        self._settings = settings
        self._server: grpc.aio.Server | None = None
        self._ending: asyncio.Task[None] | None = None
        self.port = 0
        self.cut_off = 0

    async def start(self) -> None:
        """Listen, and answer calls. Raises BindError."""
        limits = self._settings.limits
        limited = {
            "grpc.max_metadata_size": limits.max_header_bytes,
            "grpc.absolute_max_metadata_size": limits.max_header_bytes,
            "grpc.max_connection_idle_ms": 1000 * self._settings.keep_alive_seconds,
            "grpc.server_handshake_timeout_ms": math.ceil(1000 * limits.header_timeout_seconds),
            "grpc.max_allowed_incoming_connections": limits.max_connections,
        }
        options = [
            ("grpc.so_reuseport", 0),  # else two servers may share the port unnoticed
            ("grpc.max_receive_message_length", self._max_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.bdp_probe", 0),  # else megabytes of each call arrive that waits to be received
            *((name, min(value, _MOST)) for name, value in limited.items()),
        ]
        self._server = grpc.aio.server(handlers=[self._service], options=options)
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            raise BindError(f"grpc.port: expected a free address, got {self._address}") from error
        await self._server.start()
        logger.info("gRPC: listening on %s:%d", self._address.rpartition(":")[0], self.port)

    def finish(self, seconds: float) -> None:
        """Accept no more calls, and let those that are open end within `seconds`."""
        if self._server is not None and self._ending is None:
            self._ending = asyncio.create_task(self._end(self._server, seconds))

    async def stop(self) -> None:
        """Wait until all calls have ended, or the time of `finish` is over; by default a second."""
        self.finish(_FLUSH_SECONDS)
        if self._ending is not None:
            await self._ending

    async def _end(self, server: grpc.aio.Server, seconds: float) -> None:
        closing = asyncio.create_task(server.stop(seconds + _FLUSH_SECONDS))
        self.cut_off = await self._service.end(seconds)
        if self.cut_off:
            logger.error("gRPC: calls whose answers were not sent or read, ended now: %d", self.cut_off)
        await server.stop(None if self.cut_off else _FLUSH_SECONDS)
        await closing
