"""The client for threads."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic

from expertd_client.arrays import Array
from expertd_client.base import BaseClient
from expertd_client.calls import layer_call
from expertd_client.channel.channel import Channel
from expertd_client.channel.device_channel import DeviceChannel
from expertd_client.channel.link import SPIN_SECONDS
from expertd_client.channel.making import ChannelOptions, make_device_channel
from expertd_client.metadata import ModelMetadata, ModelStatus, ServerMetadata
from expertd_client.outputs import Output
from expertd_client.steps import Begun, Steps, run


class ExpertClient(BaseClient):
    """Calls to an expertd server, or several; may be shared by threads, which then call at the same time.

    `url`: `http://host:port`, `https://host:port` or `unix:/path`. Several servers: a list of URLs;
    `dns:NAME:PORT`, all addresses of a name, over http; `file:/path`, with a URL in each line; the last
    two may change. Their layers of one name are one layer: a call goes to the server that is expected to
    be done first, or, where servers have different `local_experts`, to one of each part. `key`: the API
    key to send (default: EXPERTD_KEY of the environment; "": none). `ca`: a file of the CA certificates
    to trust with https (default: EXPERTD_CA of the environment, or else the system's). `certificate`: a
    file with the certificate to show a server that asks for one, and its key, or a tuple of two.
    `transport`: `auto` takes the fastest that works with this server. `timeout`: seconds that a call may
    take in all, unless it says otherwise (math.inf: any time). At most `max_connections` calls run at a
    time; others wait for their turn. A busy server that sends Retry-After is asked again up to
    `max_retries` times. A call that has lost its server, which is restarted for example, is repeated for
    `retry_seconds`, also over channels. Of several servers, calls leave one that dies or drains at once,
    and one that hangs within `failover_seconds`. Raises InvalidRequestError for arguments that cannot
    work, and connects only when it is used.
    """

    def infer(
        self,
        model: str,
        hidden_states: Array,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        output_dtype: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        out: Array | None = None,
    ) -> Array:
        """The layer's output [tokens, hidden_size] for `hidden_states` [tokens, hidden_size].

        `hidden_states`: float32, float16 or bfloat16; in NumPy, bfloat16 is ml_dtypes' or uint16 (its bits).
        `topk_ids` (int32 or int64) and `topk_weights` (float32), [tokens, top_k] each: the experts of each
        token and their weights; without them the layer's router chooses. The output is of the same kind as
        `hidden_states`, on the same device, of `output_dtype` or of their dtype. Requests with a lower
        `priority`, 1 to 255, are computed first; 0 is the server's default. `out` has it written there,
        without new memory; its contents are undefined after an error.

        Raises InvalidRequestError, AccessDeniedError, UnknownModelError, ServerBusyError, DeadlineError,
        ServerUnreachableError, InvalidAnswerError; ExpertError for other statuses, such as 500.
        """
        call = layer_call(model, hidden_states, topk_ids, topk_weights, output_dtype, out, priority)
        run(self._infer(call, timeout))
        result: Array = call.output.result()
        return result

    def submit(
        self,
        model: str,
        hidden_states: Array,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        output_dtype: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        out: Array | None = None,
    ) -> "PendingCall[Array]":
        """`infer` in two parts: sends the request; this thread has time until it waits for the output.

        Inputs and `out` are not to be changed before. Calls in flight take turns and a channel's places as
        others do: where they may be more than there are, wait for them in the order of their submission.
        """
        call = layer_call(model, hidden_states, topk_ids, topk_weights, output_dtype, out, priority)
        return PendingCall(self._infer(call, timeout), call.output)

    def metadata(self, model: str, *, timeout: float | None = None) -> ModelMetadata:
        """The sizes of a model, and what its layer computes. Raises UnknownModelError."""
        return run(self._metadata(model, timeout))

    def server(self, *, timeout: float | None = None) -> ServerMetadata:
        """Name, version and extensions of the server."""
        return run(self._server(timeout))

    def models(self, *, timeout: float | None = None) -> list[ModelStatus]:
        """The served models, ready or not."""
        return run(self._models(timeout))

    def ready(self, model: str | None = None, *, timeout: float | None = None) -> bool:
        """Whether the server, or one model of it, would answer infer calls.

        False if the server cannot be reached, or has no such model.
        """
        return run(self._ready(model, timeout))

    def live(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers, which it also does while it loads."""
        return run(self._live(timeout))

    def open_channel(
        self,
        models: str | Sequence[str],
        *,
        max_tokens: int,
        num_slots: int = 4,
        datatype: str | None = None,
        output_datatype: str | None = None,
        device: object = None,
        timeout: float | None = None,
        spin_seconds: float = SPIN_SECONDS,
        over_nixl: bool | None = None,
    ) -> Channel:
        """A channel without copies, and as many requests in flight as slots, to a server on this machine.

        models           a name, or several, of layers with the same hidden_size and top_k
        max_tokens       of a request
        datatype         of hidden_states: BF16, FP16 or FP32 (default: the model's)
        output_datatype  of the output (default: the same)
        device           None: NumPy arrays; "cpu": torch tensors in the same memory of the host; "cuda:0":
                         torch tensors in memory of that GPU, which the server's GPU reads and writes itself
        timeout          seconds that opening, and later each request, may take (default: the client's)
        spin_seconds     how long `wait` looks for an answer before it sleeps
        over_nixl        to a server that may be on another machine, which NIXL copies tensors to and from
                         (default: if the client's transport is nixl)

        Raises InvalidRequestError, UnknownModelError, ServerBusyError if the server has no room for it,
        TransportUnavailableError, ServerUnreachableError, DeadlineError.
        """
        deadline = self._deadline(timeout)
        options = ChannelOptions(
            models,
            num_slots,
            max_tokens,
            datatype,
            output_datatype,
            device,
            deadline,
            spin_seconds,
            self._is_over_nixl(over_nixl),
        )
        return run(self._open_channel(Channel, options))

    def open_device_channel(
        self,
        models: str | Sequence[str],
        *,
        max_tokens: int = 512,
        num_slots: int = 2,
        device: object = "cuda",
        timeout: float | None = None,
        nan_on_failure: bool = True,
    ) -> DeviceChannel:
        """A channel for calls that a GPU makes by itself, also from CUDA graphs.

        models          a name, or several, of layers with the same hidden_size and top_k
        max_tokens      of a call, at most 512
        num_slots       calls that may be under way at once
        device          the GPU of the tensors
        timeout         seconds that opening, and later each call, may take (default: the client's)
        nan_on_failure  outputs are NaN once a call has failed; False: the stream goes no further, so that
                        nothing is made of them in a process that ends when the channel's `check` raises

        Raises as `open_channel`.
        """
        options = ChannelOptions(models, num_slots, max_tokens, None, None, device, self._deadline(timeout))
        return run(make_device_channel(self._to, options, nan_on_failure))

    def close(self) -> None:
        """Close connections and free what transports hold."""
        run(self._close())

    def __enter__(self) -> "ExpertClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PendingCall(Generic[Array]):
    """A call of ExpertClient.submit, for one thread at a time. Dropped without `wait`, it is given up."""

    def __init__(self, steps: Steps[None], output: Output) -> None:
        self._call = Begun(steps)
        self._output = output
        self._error: BaseException | None = None
        self._go_on(self._call.begin)

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        self._go_on(self._call.begin)
        return self._call.is_done

    def wait(self) -> Array:
        """The output. Raises what `infer` does."""
        self._go_on(self._call.finish)
        if self._error is not None:
            raise self._error
        result: Array = self._output.result()
        return result

    def _go_on(self, how: Callable[[], Steps[None]]) -> None:
        try:
            run(how())
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
