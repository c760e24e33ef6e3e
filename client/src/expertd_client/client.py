"""The client for threads."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from expertd_client.address import parse_address
from expertd_client.arrays import Array
from expertd_client.calls import check_limits, check_model, layer_call
from expertd_client.channel.blocking import ChannelTransport
from expertd_client.channel.channel import Channel
from expertd_client.channel.link import SPIN_SECONDS
from expertd_client.channel.making import ChannelOptions, make_channel
from expertd_client.deadline import Deadline
from expertd_client.errors import (
    DeadlineError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
)
from expertd_client.http.blocking import HttpTransport
from expertd_client.http.requests import model_path
from expertd_client.metadata import (
    ModelMetadata,
    ModelStatus,
    ServerMetadata,
    read_metadata,
    read_server,
    read_statuses,
)
from expertd_client.shared_memory.blocking import SharedMemoryTransport
from expertd_client.steps import run
from expertd_client.transport import Choice, NotThisCallError, Transport, TransportName

DEFAULT_TIMEOUT = 60.0
DEFAULT_CONNECTIONS = 128
DEFAULT_RETRIES = 3


class ExpertClient:
    """Calls to one expertd server; may be shared by threads, which then call at the same time.

    `url`: `http://host:port` or `unix:/path`. `transport`: `auto` takes the fastest that works with this
    server. `timeout`: seconds that a call may take in all, unless it says otherwise (math.inf: any time).
    At most `max_connections` calls run at a time; others wait for their turn. A busy server that sends
    Retry-After is asked again up to `max_retries` times. Raises InvalidRequestError for arguments that cannot
    work, and connects only when it is used.
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
        self._http = HttpTransport(address, max_connections, max_retries)
        limits = max_connections, max_retries
        factories: dict[str, Callable[[], Transport]] = {
            "channel": lambda: ChannelTransport(self._http, *limits),
            "shared_memory": lambda: SharedMemoryTransport(self._http, max_connections),
            "http": lambda: self._http,
        }
        self._choice: Choice[Transport] = Choice(transport, address, factories)

    @property
    def transport(self) -> TransportName:
        """The transport that infer calls take now."""
        return self._choice.current.name

    def infer(
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

        `hidden_states`: float32, float16 or bfloat16; in NumPy, bfloat16 is ml_dtypes' or uint16 (its bits).
        `topk_ids` (int32 or int64) and `topk_weights` (float32), [tokens, top_k] each: the experts of each
        token and their weights; without them the layer's router chooses. The output is of the same kind as
        `hidden_states`, on the same device, of `output_dtype` or of their dtype. `out` has it written there,
        without new memory; its contents are undefined after an error.

        Raises InvalidRequestError, UnknownModelError, ServerBusyError, DeadlineError, ServerUnreachableError,
        InvalidAnswerError; ExpertError for other statuses, such as 500.
        """
        call = layer_call(model, hidden_states, topk_ids, topk_weights, output_dtype, out)
        deadline = self._deadline(timeout)
        while True:
            transport = self._choice.current
            try:
                transport.infer(call, deadline)
            except NotThisCallError as reason:
                self._choice.pass_over(transport, reason)
                self._http.infer(call, deadline)
            except TransportUnavailableError as error:
                self._choice.fall_back(transport, error)
                continue
            result: Array = call.output.result()
            return result

    def metadata(self, model: str, *, timeout: float | None = None) -> ModelMetadata:
        """The sizes of a model. Raises UnknownModelError."""
        check_model(model)
        return read_metadata(self._http.request("GET", model_path(model), self._deadline(timeout)))

    def server(self, *, timeout: float | None = None) -> ServerMetadata:
        """Name, version and extensions of the server."""
        return read_server(self._http.request("GET", "/v2", self._deadline(timeout)))

    def models(self, *, timeout: float | None = None) -> list[ModelStatus]:
        """The served models, ready or not."""
        answer = self._http.request("POST", "/v2/repository/index", self._deadline(timeout))
        return read_statuses(answer)

    def ready(self, model: str | None = None, *, timeout: float | None = None) -> bool:
        """Whether the server, or one model of it, would answer infer calls; False if it cannot be reached."""
        path = "/v2/health/ready" if model is None else f"{model_path(model)}/ready"
        return self._is_ok(path, timeout)

    def live(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers, which it also does while it loads."""
        return self._is_ok("/v2/health/live", timeout)

    def open_channel(
        self,
        model: str,
        *,
        max_tokens: int,
        num_slots: int = 4,
        datatype: str | None = None,
        output_datatype: str | None = None,
        device: object = None,
        timeout: float | None = None,
        spin_seconds: float = SPIN_SECONDS,
    ) -> Channel:
        """A channel to a server on this machine: no copies, and as many requests in flight as slots.

        max_tokens       of a request
        datatype         of hidden_states: BF16, FP16 or FP32 (default: the model's)
        output_datatype  of the output (default: the same)
        device           None: NumPy arrays; "cpu": torch tensors in the same memory of the host; "cuda:0":
                         torch tensors in memory of that GPU, which the server's GPU reads and writes itself
        timeout          seconds that opening, and later each request, may take (default: the client's)
        spin_seconds     how long `wait` looks for an answer before it sleeps

        Raises InvalidRequestError, UnknownModelError, ServerBusyError if the server has no room for it,
        TransportUnavailableError, ServerUnreachableError, DeadlineError.
        """
        deadline = self._deadline(timeout)
        options = ChannelOptions(
            model, num_slots, max_tokens, datatype, output_datatype, device, deadline.seconds, spin_seconds
        )
        return run(make_channel(Channel, options, deadline), self._http, deadline)

    def close(self) -> None:
        """Close connections and free what transports hold."""
        self._choice.close()
        self._http.close()

    def __enter__(self) -> "ExpertClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_ok(self, path: str, timeout: float | None) -> bool:
        try:
            self._http.request("GET", path, self._deadline(timeout))
        except (ServerBusyError, ServerUnreachableError, DeadlineError):
            return False
        return True

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)
