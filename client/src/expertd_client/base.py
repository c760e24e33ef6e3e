"""What the clients for threads and for event loops share: their calls as steps."""

from collections.abc import Sequence
from typing import TypeVar

from expertd_client.calls import LayerCall, check_limits, check_model
from expertd_client.channel.base import BaseChannel
from expertd_client.channel.making import ChannelOptions, make_channel
from expertd_client.deadline import Deadline
from expertd_client.errors import (
    DeadlineError,
    ServerBusyError,
    ServerUnreachableError,
    UnknownModelError,
)
from expertd_client.metadata import (
    ModelMetadata,
    ModelStatus,
    ServerMetadata,
    ServerState,
    read_server,
    read_statuses,
)
from expertd_client.pool import ServerPool
from expertd_client.server import Server, ServerOptions
from expertd_client.sources import source_of
from expertd_client.steps import Steps
from expertd_client.tls import Certificate, File
from expertd_client.transport import TransportName
from expertd_client.watch import watched

DEFAULT_TIMEOUT = 60.0
DEFAULT_CONNECTIONS = 128
DEFAULT_RETRIES = 3
DEFAULT_FAILOVER = 1.0

C = TypeVar("C", bound=BaseChannel)


class BaseClient:
    """ServerOptions, the server or the pool, and calls; `timeout` None is the client's."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        key: str | None = None,
        ca: File | None = None,
        certificate: Certificate | None = None,
        transport: TransportName = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        max_connections: int = DEFAULT_CONNECTIONS,
        max_retries: int = DEFAULT_RETRIES,
        retry_seconds: float = 0.0,
        failover_seconds: float = DEFAULT_FAILOVER,
    ) -> None:
        check_limits(timeout, max_connections, max_retries, retry_seconds, failover_seconds)
        self._timeout, self._retry_seconds = timeout, retry_seconds
        settings = ServerOptions(key, ca, certificate, transport, max_connections, max_retries)
        self._to: Server | ServerPool
        if (source := source_of(url)) is None:
            self._to = Server(str(url), settings)
        else:
            self._to = watched(source, settings, failover_seconds)

    @property
    def transport(self) -> TransportName:
        """The transport that infer calls take now; of a pool's first server."""
        return self._to.transport

    @property
    def is_local(self) -> bool:
        """Whether the server, or one of a pool's, is on this machine, as far as its address says."""
        return self._to.is_local

    def servers(self) -> list[ServerState]:
        """What is known of each server of a pool, without asking them."""
        return self._to.states()

    def _infer(self, call: LayerCall, timeout: float | None) -> Steps[None]:
        return self._to.infer(call, self._deadline(timeout))

    def _metadata(self, model: str, timeout: float | None) -> Steps[ModelMetadata]:
        check_model(model)
        return self._to.metadata(model, self._deadline(timeout))

    def _server(self, timeout: float | None) -> Steps[ServerMetadata]:
        return read_server((yield from self._to.request("GET", "/v2", self._deadline(timeout))))

    def _models(self, timeout: float | None) -> Steps[list[ModelStatus]]:
        deadline = self._deadline(timeout)
        answers = yield from self._to.each("POST", "/v2/repository/index", deadline)
        found: dict[str, ModelStatus] = {}
        for status in (status for answer in answers for status in read_statuses(answer)):
            if status.name not in found or status.ready:
                found[status.name] = status
        return list(found.values())

    def _ready(self, model: str | None, timeout: float | None) -> Steps[bool]:
        if model is None:
            return (yield from _is_true(self._to.request("GET", "/v2/health/ready", self._once(timeout))))
        check_model(model)
        try:
            return (yield from _is_true(self._to.check_ready(model, self._once(timeout))))
        except UnknownModelError:
            return False

    def _live(self, timeout: float | None) -> Steps[bool]:
        return _is_true(self._to.request("GET", "/v2/health/live", self._once(timeout)))

    def _is_over_nixl(self, given: bool | None) -> bool:
        return self.transport == "nixl" if given is None else given

    def _open_channel(self, kind: type[C], options: ChannelOptions) -> Steps[C]:
        return make_channel(self._to, kind, options)

    def _close(self) -> Steps[None]:
        return self._to.close()

    def _once(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout, self._retry_seconds)


def _is_true(steps: Steps[object]) -> Steps[bool]:
    """Whether a question is answered with anything but no."""
    try:
        yield from steps
    except (ServerBusyError, ServerUnreachableError, DeadlineError):
        return False
    return True
