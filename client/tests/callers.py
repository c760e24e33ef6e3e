"""Both clients behind one interface, so that each test runs with both."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from expertd_client import AsyncExpertClient, ExpertClient, ModelMetadata, ModelStatus, ServerMetadata


class Caller:
    """An ExpertClient."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client = ExpertClient(url, **options)

    def infer(self, *arguments: Any, **options: Any) -> Any:
        return self.client.infer(*arguments, **options)

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

    def close(self) -> None:
        self._runner.run(self.client.close())

    def end(self) -> None:
        """Close the event loop too."""
        self.close()
        self._runner.close()


AnyCaller: TypeAlias = Caller | AsyncCaller
Connect: TypeAlias = Callable[..., AnyCaller]
