"""grpc.health.v1.Health: whether the server or a model is ready, for Kubernetes and gRPC clients."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from expertd.service.engine.engine import Engine
from expertd.service.engine.errors import NotReadyError
from expertd.service.grpc.tables import SERVICE
from expertd.service.http.bodies import CONTROL_BODY
from expertd.service.http.protocol import OipError
from expertd.service.util.sentences import shown

HEALTH = "grpc.health.v1.Health"
_SERVER = ("", SERVICE)  # the services that are the whole server; models are others, by their names
_LOOK_SECONDS = 0.1  # between looks at what has changed, while there are watchers
_TRY_EVERY = 10  # looks: a model whose steps fail becomes ready by a step that succeeds
_Response = health_pb2.HealthCheckResponse


class Health:
    """Answers both calls; for the event loop.

    max_watchers  watchers at a time: they need no key, and must leave open calls to others
    """

    def __init__(self, engine: Engine, max_watchers: int) -> None:
        self._engine = engine
        self._max_watchers = max_watchers
        self._num_watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # replaced by another one at each change
        self._is_ending = False

    def check(self, data: bytes) -> bytes:
        """The serialized response to a serialized HealthCheckRequest. Raises OipError (400, 404, 413)."""
        service = _service(data)
        status = self._status(service)
        if status == _Response.SERVICE_UNKNOWN:
            raise OipError(404, f"service: expected a served model, or none for all, got {shown(service)}")
        return _serialized(status)

    async def watch(self, data: bytes, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write the status, and again whenever it changes, until the server ends. Raises OipError."""
        service = _service(data)
        if self._num_watchers >= self._max_watchers:
            limit = f"{self._max_watchers}, half of limits.max_connections"
            raise OipError(503, f"watchers: expected at most {limit}, got one more", retry_after=1)
        self._num_watchers += 1
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look(self._statuses()))
        try:
            await self._follow(service, write)
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._looking.cancel()
                self._looking = None

    def end(self) -> None:
        """Have every watcher write what has changed, and end."""
        self._is_ending = True
        self._wake()

    async def _follow(self, service: str, write: Callable[[bytes], Awaitable[object]]) -> None:
        sent = None
        while True:
            changed = self._changed  # first: what changes from here on is seen
            if (status := self._status(service)) != sent:
                await write(_serialized(status))
                sent = status
            elif self._is_ending:
                raise OipError(503, "the server is shutting down")
            else:
                await changed.wait()

    async def _look(self, before: list[bool]) -> None:
        for number in count(1):
            await asyncio.sleep(_LOOK_SECONDS)
            if number % _TRY_EVERY == 0:
                self._status("")
            before, now = self._statuses(), before
            if before != now:
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _statuses(self) -> list[bool]:
        """Whether each service can serve; runs no step."""
        names = [(), *((model,) for model in self._engine.models)]
        return [self._engine.why_not_ready(*models) is None for models in names]

    def _status(self, service: str) -> int:
        """As the HTTP call for the same has it; also tries the models whose steps fail."""
        models = () if service in _SERVER else (service,)
        if not self._engine.models.keys() >= set(models):
            return int(_Response.SERVICE_UNKNOWN)
        try:
            self._engine.check_ready(*models)
        except NotReadyError:
            return int(_Response.NOT_SERVING)
        return int(_Response.SERVING)


def _service(data: bytes) -> str:
    """The service that a request names. Raises OipError (400, 413)."""
    CONTROL_BODY.check(len(data), is_whole=True)
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError as error:
        text = f"request: expected a HealthCheckRequest, got another message ({error})"
        raise OipError(400, text) from error


def _serialized(status: int) -> bytes:
    message: bytes = _Response(status=status).SerializeToString()
    return message
