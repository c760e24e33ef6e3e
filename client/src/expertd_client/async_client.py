"""The client for asyncio."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from expertd_client.address import parse_address
from expertd_client.arrays import Array
from expertd_client.calls import check_limits, check_model, layer_call
from expertd_client.channel.async_channel import AsyncChannel
from expertd_client.channel.events import AsyncChannelTransport
from expertd_client.channel.making import ChannelOptions, make_channel
from expertd_client.client import DEFAULT_CONNECTIONS, DEFAULT_RETRIES, DEFAULT_TIMEOUT
from expertd_client.deadline import Deadline
from expertd_client.errors import (
    DeadlineError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
)
from expertd_client.http.events import AsyncHttpTransport
from expertd_client.http.requests import model_path
from expertd_client.metadata import (
    ModelMetadata,
    ModelStatus,
    ServerMetadata,
    read_metadata,
    read_server,
    read_statuses,
)
from expertd_client.shared_memory.events import AsyncSharedMemoryTransport
from expertd_client.steps import run_async
from expertd_client.transport import AsyncTransport, Choice, NotThisCallError, TransportName


class AsyncExpertClient:
    """ExpertClient for one event loop, whose tasks may call at the same time.

    The arguments are the same. Tensors of a GPU are copied to and from the host in the event loop's thread.
    """

    def __init__(
        self,
        url: str,
        *,
        transport: TransportName = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        max_connections: int = DEFAULT_CONNECTIONS,
        max_retries: int = DEFAULT_RETRIES,
    ) -> None:
        check_limits(timeout, max_connections, max_retries)
        address = parse_address(url)
        self._timeout = timeout
        self._http = AsyncHttpTransport(address, max_connections, max_retries)
        limits = max_connections, max_retries
        factories: dict[str, Callable[[], AsyncTransport]] = {
            "channel": lambda: AsyncChannelTransport(self._http, *limits),
            "shared_memory": lambda: AsyncSharedMemoryTransport(self._http, max_connections),
            "http": lambda: self._http,
        }
        self._choice: Choice[AsyncTransport] = Choice(transport, address, factories)

    @property
    def transport(self) -> TransportName:
        """The transport that infer calls take now."""
        return self._choice.current.name

    async def infer(
        self,
        model: str,
        hidden_states: Array,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        output_dtype: Any = None,
        timeout: float | None = None,
        out: Array | None = None,
    ) -> Array:
        """The layer's output [tokens, hidden_size] for `hidden_states` [tokens, hidden_size].

        Arguments and errors as in ExpertClient.infer. If the task is cancelled, so is the request.
        """
        call = layer_call(model, hidden_states, topk_ids, topk_weights, output_dtype, out)
        deadline = self._deadline(timeout)
        while True:
            transport = self._choice.current
            try:
                await transport.infer(call, deadline)
            except NotThisCallError as reason:
                self._choice.pass_over(transport, reason)
                await self._http.infer(call, deadline)
            except TransportUnavailableError as error:
                self._choice.fall_back(transport, error)
                continue
            result: Array = call.output.result()
            return result

    async def metadata(self, model: str, *, timeout: float | None = None) -> ModelMetadata:
        """The sizes of a model. Raises UnknownModelError."""
        check_model(model)
        return read_metadata(await self._http.request("GET", model_path(model), self._deadline(timeout)))

    async def server(self, *, timeout: float | None = None) -> ServerMetadata:
        """Name, version and extensions of the server."""
        return read_server(await self._http.request("GET", "/v2", self._deadline(timeout)))

    async def models(self, *, timeout: float | None = None) -> list[ModelStatus]:
        """The served models, ready or not."""
        answer = await self._http.request("POST", "/v2/repository/index", self._deadline(timeout))
        return read_statuses(answer)

    async def ready(self, model: str | None = None, *, timeout: float | None = None) -> bool:
        """Whether the server, or one model of it, would answer infer calls; False if it cannot be reached."""
        path = "/v2/health/ready" if model is None else f"{model_path(model)}/ready"
        return await self._is_ok(path, timeout)

    async def live(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers, which it also does while it loads."""
        return await self._is_ok("/v2/health/live", timeout)

    async def open_channel(
        self,
        model: str,
        *,
        max_tokens: int,
        num_slots: int = 4,
        datatype: str | None = None,
        output_datatype: str | None = None,
        device: object = None,
        timeout: float | None = None,
    ) -> AsyncChannel:
        """A channel to a server on this machine: no copies, and as many requests in flight as slots.

        Arguments and errors as in ExpertClient.open_channel. There is no spin_seconds: tasks that wait for an
        answer leave the event loop to the others.
        """
        deadline = self._deadline(timeout)
        options = ChannelOptions(
            model, num_slots, max_tokens, datatype, output_datatype, device, deadline.seconds
        )
        return await run_async(make_channel(AsyncChannel, options, deadline), self._http, deadline)

    async def close(self) -> None:
        """Close connections and free what transports hold."""
        self._choice.close()
        self._http.close()

    async def __aenter__(self) -> "AsyncExpertClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _is_ok(self, path: str, timeout: float | None) -> bool:
        try:
            await self._http.request("GET", path, self._deadline(timeout))
        except (ServerBusyError, ServerUnreachableError, DeadlineError):
            return False
        return True

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)
