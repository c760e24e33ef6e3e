"""What the clients for threads and for event loops share: their calls as steps."""

from typing import TypeVar

from expertd_client.address import parse_address
from expertd_client.calls import LayerCall, check_limits, check_model
from expertd_client.channel.base import BaseChannel
from expertd_client.channel.making import ChannelOptions, make_channel
from expertd_client.channel.transport import ChannelTransport
from expertd_client.deadline import Deadline
from expertd_client.errors import (
    DeadlineError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.http.requests import model_path
from expertd_client.http.transport import HttpTransport
from expertd_client.metadata import (
    ModelMetadata,
    ModelStatus,
    ServerMetadata,
    read_metadata,
    read_server,
    read_statuses,
)
from expertd_client.places import WideIdsError
from expertd_client.steps import Steps
from expertd_client.tls import Certificate, File
from expertd_client.transport import Choice, NotThisCallError, TransportName

DEFAULT_TIMEOUT = 60.0
DEFAULT_CONNECTIONS = 128
DEFAULT_RETRIES = 3

C = TypeVar("C", bound=BaseChannel)


class BaseClient:
    """Settings, the transport in use, and calls; `timeout` None is the client's."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        ca: File | None = None,
        certificate: Certificate | None = None,
        transport: TransportName = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        max_connections: int = DEFAULT_CONNECTIONS,
        max_retries: int = DEFAULT_RETRIES,
        retry_seconds: float = 0.0,
    ) -> None:
        check_limits(timeout, max_connections, max_retries, retry_seconds)
        address = parse_address(url, key, ca, certificate)
        self._timeout, self._retry_seconds = timeout, retry_seconds
        self._max_tokens: dict[str, int] = {}  # of a request, where a call was larger
        self._http = HttpTransport(address, max_connections, max_retries)
        channel = ChannelTransport(self._http, max_connections, max_retries)
        self._choice = Choice(transport, address, channel, self._http)

    @property
    def transport(self) -> TransportName:
        """The transport that infer calls take now."""
        return self._choice.current.name

    def _infer(self, call: LayerCall, timeout: float | None) -> Steps[None]:
        return self._whole(call, self._deadline(timeout))

    def _whole(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        """Have a call answered, in parts if it is larger than the server takes."""
        if call.shape[0] <= self._max_tokens.get(call.model, call.shape[0]):
            try:
                return (yield from self._answer(call, deadline))
            except InvalidRequestError as error:
                if not (yield from self._is_too_large(call, error, deadline)):
                    raise
        for part in call.parts(self._max_tokens[call.model]):
            yield from self._whole(part, deadline)
            part.output.result()

    def _is_too_large(self, call: LayerCall, error: InvalidRequestError, deadline: Deadline) -> Steps[bool]:
        """Whether parts of a call may be accepted that was refused; then how large they may be is known."""
        rows = call.shape[0]
        if error.status is None or rows < 2 or (error.status != 413 and "tokens" not in str(error)):
            return False
        max_rows: int | None = -(-rows // 2)
        if error.status != 413:  # which is about bytes
            model = read_metadata((yield from self._http.request("GET", model_path(call.model), deadline)))
            max_rows = model.max_request_tokens
        if max_rows is None or rows <= max_rows:
            return False
        self._max_tokens[call.model] = max_rows
        return True

    def _answer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        while True:
            transport = self._choice.current
            try:
                yield from transport.infer(call, deadline)
            except WideIdsError:  # over HTTP, the server says which experts it has
                yield from self._http.infer(call, deadline)
            except NotThisCallError as reason:
                self._choice.pass_over(transport, reason)
                yield from self._http.infer(call, deadline)
            except TransportUnavailableError as error:
                yield from self._choice.fall_back(transport, error)
                continue
            return

    def _metadata(self, model: str, timeout: float | None) -> Steps[ModelMetadata]:
        check_model(model)
        deadline = self._deadline(timeout)
        return read_metadata((yield from self._http.request("GET", model_path(model), deadline)))

    def _server(self, timeout: float | None) -> Steps[ServerMetadata]:
        return read_server((yield from self._http.request("GET", "/v2", self._deadline(timeout))))

    def _models(self, timeout: float | None) -> Steps[list[ModelStatus]]:
        deadline = self._deadline(timeout)
        return read_statuses((yield from self._http.request("POST", "/v2/repository/index", deadline)))

    def _ready(self, model: str | None, timeout: float | None) -> Steps[bool]:
        if model is None:
            return (yield from self._is_ok("/v2/health/ready", timeout))
        check_model(model)
        try:
            return (yield from self._is_ok(f"{model_path(model)}/ready", timeout))
        except UnknownModelError:
            return False

    def _live(self, timeout: float | None) -> Steps[bool]:
        return self._is_ok("/v2/health/live", timeout)

    def _open_channel(self, kind: type[C], options: ChannelOptions) -> Steps[C]:
        return make_channel(self._http, kind, options)

    def _close(self) -> Steps[None]:
        yield from self._choice.close()
        yield from self._http.close()

    def _is_ok(self, path: str, timeout: float | None) -> Steps[bool]:
        try:
            yield from self._http.request(
                "GET", path, Deadline(self._timeout if timeout is None else timeout)
            )
        except (ServerBusyError, ServerUnreachableError, DeadlineError):
            return False
        return True

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout, self._retry_seconds)
