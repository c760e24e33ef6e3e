"""One server: the transports to it, and calls."""

from dataclasses import dataclass
from typing import Any

from expertd_client.address import parse_address
from expertd_client.calls import LayerCall
from expertd_client.channel.link import ChannelClient
from expertd_client.channel.transport import ChannelTransport
from expertd_client.deadline import Deadline
from expertd_client.errors import InvalidRequestError, TransportUnavailableError
from expertd_client.http.requests import model_path
from expertd_client.http.transport import HttpTransport
from expertd_client.metadata import ModelMetadata, ServerState, read_metadata
from expertd_client.places import WideIdsError
from expertd_client.steps import Steps
from expertd_client.tls import Certificate, File
from expertd_client.transport import Choice, NotThisCallError, TransportName


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Of a client, for each of its servers.

    connect_seconds  that a connection may take beside a call's own time; None: no limit of its own
    """

    key: str | None
    ca: File | None
    certificate: Certificate | None
    transport: TransportName
    max_connections: int
    max_retries: int
    connect_seconds: float | None = None


class Server:
    """Calls to one server. Raises InvalidRequestError for an address that cannot be."""

    def __init__(self, url: str, settings: ServerOptions) -> None:
        address = parse_address(url, settings.key, settings.ca, settings.certificate)
        limits = settings.max_connections, settings.max_retries
        self.url, self.is_local = address.url, address.is_local
        self._max_tokens: dict[str, int] = {}  # of a request, where a call was larger
        self._http = HttpTransport(address, *limits, settings.connect_seconds)
        self._channel = ChannelTransport(self._http, *limits)
        self._nixl = ChannelTransport(self._http, *limits, over_nixl=True)
        self._choice = Choice(settings.transport, address, self._channel, self._nixl, self._http)

    @property
    def transport(self) -> TransportName:
        """The transport that infer calls take now."""
        return self._choice.current.name

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
        """See `Asker.request`."""
        return self._http.request(method, path, deadline, body)

    def channel_opened(self, opened: Any, link: ChannelClient) -> None:
        """See `Asker.channel_opened`."""
        self._http.channel_opened(opened, link)

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        """Have a call answered, in parts if it is larger than the server takes."""
        if call.shape[0] <= self._max_tokens.get(call.model, call.shape[0]):
            try:
                return (yield from self._answer(call, deadline))
            except InvalidRequestError as error:
                if not (yield from self._is_too_large(call, error, deadline)):
                    raise
        for part in call.parts(self._max_tokens[call.model]):
            yield from self.infer(part, deadline)
            part.output.result()

    def check_ready(self, model: str, deadline: Deadline) -> Steps[None]:
        """Raises what its server says if a layer is not ready."""
        yield from self._http.request("GET", f"{model_path(model)}/ready", deadline)

    def metadata(self, model: str, deadline: Deadline) -> Steps[ModelMetadata]:
        """The metadata of a layer."""
        return read_metadata((yield from self._http.request("GET", model_path(model), deadline)))

    def each(self, method: str, path: str, deadline: Deadline) -> Steps[list[Any]]:
        """What it answers."""
        return [(yield from self._http.request(method, path, deadline))]

    def states(self) -> list[ServerState]:
        """None: it is no pool, and nobody looks after it."""
        return []

    def break_off(self) -> None:
        """End the connections of calls that wait, from any thread: they raise ServerUnreachableError."""
        self._http.break_off()
        self._channel.break_off()
        self._nixl.break_off()

    def close(self) -> Steps[None]:
        """Close connections and free what transports hold."""
        yield from self._choice.close()
        yield from self._http.close()

    def _is_too_large(self, call: LayerCall, error: InvalidRequestError, deadline: Deadline) -> Steps[bool]:
        """Whether parts of a call may be accepted that was refused; then how large they may be is known."""
        rows = call.shape[0]
        if error.status is None or rows < 2 or (error.status != 413 and "tokens" not in str(error)):
            return False
        max_rows: int | None = -(-rows // 2)
        if error.status != 413:  # which is about bytes
            max_rows = (yield from self.metadata(call.model, deadline)).max_request_tokens
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
