"""The client for asyncio."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic

from expertd_client.arrays import Array
from expertd_client.base import BaseClient
from expertd_client.calls import layer_call
from expertd_client.channel.async_channel import AsyncChannel
from expertd_client.channel.making import ChannelOptions
from expertd_client.metadata import ModelMetadata, ModelStatus, ServerMetadata
from expertd_client.outputs import Output
from expertd_client.steps import Steps, run_async


class AsyncExpertClient(BaseClient):
    """ExpertClient for one event loop, whose tasks may call at the same time.

    The arguments are the same. Tensors of a GPU are copied to and from the host in the event loop's thread.
    """

    async def infer(
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

        Arguments and errors as in ExpertClient.infer. If the task is cancelled, so is the request.
        """
        call = layer_call(model, hidden_states, topk_ids, topk_weights, output_dtype, out, priority)
        await run_async(self._infer(call, timeout))
        result: Array = call.output.result()
        return result

    async def submit(
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
    ) -> "AsyncPendingCall[Array]":
        """As ExpertClient.submit; the call goes on in a task of its own."""
        call = layer_call(model, hidden_states, topk_ids, topk_weights, output_dtype, out, priority)
        pending: AsyncPendingCall[Array] = AsyncPendingCall(self._infer(call, timeout), call.output)
        await asyncio.sleep(0)  # it begins
        return pending

    async def metadata(self, model: str, *, timeout: float | None = None) -> ModelMetadata:
        """The sizes of a model, and what its layer computes. Raises UnknownModelError."""
        return await run_async(self._metadata(model, timeout))

    async def server(self, *, timeout: float | None = None) -> ServerMetadata:
        """Name, version and extensions of the server."""
        return await run_async(self._server(timeout))

    async def models(self, *, timeout: float | None = None) -> list[ModelStatus]:
        """The served models, ready or not."""
        return await run_async(self._models(timeout))

    async def ready(self, model: str | None = None, *, timeout: float | None = None) -> bool:
        """Whether the server, or one model of it, would answer infer calls.

        False if the server cannot be reached, or has no such model.
        """
        return await run_async(self._ready(model, timeout))

    async def live(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers, which it also does while it loads."""
        return await run_async(self._live(timeout))

    async def open_channel(
        self,
        models: str | Sequence[str],
        *,
        max_tokens: int,
        num_slots: int = 4,
        datatype: str | None = None,
        output_datatype: str | None = None,
        device: object = None,
        timeout: float | None = None,
        over_nixl: bool | None = None,
    ) -> AsyncChannel:
        """A channel without copies, and as many requests in flight as slots, to a server on this machine.

        Arguments and errors as in ExpertClient.open_channel. There is no spin_seconds: tasks that wait for an
        answer leave the event loop to the others.
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
            over_nixl=self._is_over_nixl(over_nixl),
        )
        return await run_async(self._open_channel(AsyncChannel, options))

    async def close(self) -> None:
        """Close connections and free what transports hold."""
        await run_async(self._close())

    async def __aenter__(self) -> "AsyncExpertClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncPendingCall(Generic[Array]):
    """A call of AsyncExpertClient.submit."""

    def __init__(self, steps: Steps[None], output: Output) -> None:
        self._task = asyncio.ensure_future(run_async(steps))
        self._output = output

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._task.done()

    async def wait(self) -> Array:
        """The output. Raises what `infer` does. If the task that waits is cancelled, so is the call."""
        await self._task
        result: Array = self._output.result()
        return result
