"""Both clients, and both channels, behind one interface, so that each test runs with both."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from expertd_client import (
    AsyncChannel,
    AsyncExpertClient,
    AsyncPendingCall,
    Channel,
    ExpertClient,
    ModelMetadata,
    ModelStatus,
    PendingCall,
    ServerMetadata,
    Slot,
    Ticket,
)
from expertd_client.channel.link import ChannelClient


class Caller:
    """An ExpertClient."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client = ExpertClient(url, **options)

    def infer(self, *arguments: Any, **options: Any) -> Any:
        return self.client.infer(*arguments, **options)

    def submit(self, *arguments: Any, **options: Any) -> PendingCall[Any]:
        return self.client.submit(*arguments, **options)

    def metadata(self, model: str) -> ModelMetadata:
        return self.client.metadata(model)

    def server(self) -> ServerMetadata:
        return self.client.server()

    def models(self) -> list[ModelStatus]:
        return self.client.models()

    def ready(self, model: str | None = None, **options: Any) -> bool:
        return self.client.ready(model, **options)

    def live(self, **options: Any) -> bool:
        return self.client.live(**options)

    def open_channel(self, models: str | Sequence[str], **options: Any) -> Channel:
        return self.client.open_channel(models, **options)

    def close(self) -> None:
        self.client.close()

    def end(self) -> None:
        self.close()


class AsyncCaller:
    """An AsyncExpertClient in an event loop of its own, which runs only during calls."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()

        async def make() -> AsyncExpertClient:
            return AsyncExpertClient(url, **options)

        try:
            self.client = self._runner.run(make())
        except BaseException:
            self._runner.close()
            raise

    def infer(self, *arguments: Any, **options: Any) -> Any:
        return self._runner.run(self.client.infer(*arguments, **options))

    def submit(self, *arguments: Any, **options: Any) -> "AsyncPendingCaller":
        return AsyncPendingCaller(self._runner.run(self.client.submit(*arguments, **options)), self._runner)

    def metadata(self, model: str) -> ModelMetadata:
        return self._runner.run(self.client.metadata(model))

    def server(self) -> ServerMetadata:
        return self._runner.run(self.client.server())

    def models(self) -> list[ModelStatus]:
        return self._runner.run(self.client.models())

    def ready(self, model: str | None = None, **options: Any) -> bool:
        return self._runner.run(self.client.ready(model, **options))

    def live(self, **options: Any) -> bool:
        return self._runner.run(self.client.live(**options))

    def open_channel(self, models: str | Sequence[str], **options: Any) -> "AsyncChannelCaller":
        opened = self._runner.run(self.client.open_channel(models, **options))
        return AsyncChannelCaller(opened, self._runner)

    def close(self) -> None:
        self._runner.run(self.client.close())

    def end(self) -> None:
        """Close the event loop too."""
        self.close()
        self._runner.close()


class AsyncPendingCaller:
    """An AsyncPendingCall with the methods of a PendingCall. Its call goes on only during one of them."""

    def __init__(self, pending: AsyncPendingCall[Any], runner: asyncio.Runner) -> None:
        self._pending, self._runner = pending, runner

    def is_done(self) -> bool:
        self._runner.run(asyncio.sleep(0.001))
        return self._pending.is_done()

    def wait(self) -> Any:
        return self._runner.run(self._pending.wait())


class AsyncChannelCaller:
    """An AsyncChannel with the methods of a Channel."""

    def __init__(self, channel: AsyncChannel, runner: asyncio.Runner) -> None:
        self._channel, self._runner = channel, runner
        self.slots = channel.slots
        self.max_tokens, self.hidden_size, self.top_k = channel.max_tokens, channel.hidden_size, channel.top_k

    @property
    def models(self) -> tuple[str, ...]:
        return self._channel.models

    @property
    def _link(self) -> ChannelClient:
        return self._channel._link

    def submit(self, slot: Slot, num_tokens: int, **options: Any) -> Ticket:
        return self._runner.run(self._channel.submit(slot, num_tokens, **options))

    def wait(self, ticket: Ticket) -> Any:
        return self._runner.run(self._channel.wait(ticket))

    def infer(self, slot: Slot, num_tokens: int, **options: Any) -> Any:
        return self._runner.run(self._channel.infer(slot, num_tokens, **options))

    def is_answered(self, ticket: Ticket) -> bool:
        return self._channel.is_answered(ticket)

    def close(self) -> None:
        self._runner.run(self._channel.close())

    def __enter__(self) -> "AsyncChannelCaller":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


AnyChannel: TypeAlias = Channel | AsyncChannelCaller
AnyCaller: TypeAlias = Caller | AsyncCaller
Connect: TypeAlias = Callable[..., AnyCaller]

one_client = pytest.mark.parametrize("connect", ["sync"], indirect=True)
"""For a test with a server of its own, of what both kinds do by the same code."""
