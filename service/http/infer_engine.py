"""What computes infer requests: the engine in this process, or in the one that owns the device."""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from expertd.service.engine.spec import LayerSpec
from expertd.service.engine.steps import Done
from expertd.service.http.infer_head import InferHead
from expertd.service.memory import Arena, RegionUses
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.model import Settings


class InferEngine(Protocol):
    """Implemented by `expertd.service.engine.engine.Engine` and `...channels.remote.RemoteEngine`.

    arena  of large bodies and outputs; None: they are bytes
    """

    @property
    def settings(self) -> Settings: ...
    @property
    def models(self) -> Mapping[str, LayerSpec]: ...
    @property
    def arena(self) -> Arena | None: ...
    @property
    def draining(self) -> bool: ...

    def model(self, name: str, version: str = ...) -> LayerSpec:
        """The served model `name`, loaded or not. Raises UnknownModelError."""

    def check_loaded(self, model: str) -> None:
        """Raise NotReadyError during loading."""

    def check_capacity(self, model: str, caller: int, least_tokens: int = 1) -> None:
        """Raise an EngineError if a request of `caller` with `least_tokens` or more would be refused now."""

    def validate(self, model: str, request: LayerRequest) -> None:
        """Raise ValueError for invalid routing; without an error, it may still be refused by `done`."""

    def submit(
        self,
        model: str,
        request: LayerRequest,
        done: Done,
        alone: bool,
        priority: int,
        caller: int,
        timeout: float | None,
    ) -> Any:
        """Compute `request`, and call `done` once on the event loop. Raises EngineError.

        alone     its caller is the only one at present
        priority  1 to 255; lower ones are computed first
        caller    the number of its key's name; callers get equal shares
        timeout   seconds after which the output is of no use; None: there is no such time
        """

    def cancel(self, pending: Any, error: Exception) -> bool:
        """Answer a queued request with `error`, now or soon; not if all of it is being computed."""

    def region_uses(self) -> RegionUses | None:
        """The regions of a new request; None if shared memory is off. Raises RegionsElsewhereError."""


class Forward(Protocol):
    """Has the engine's process answer a whole infer request."""

    def __call__(self, head: InferHead, key_name: str, content: bytes) -> Awaitable[Any]: ...
