"""Which of the configured models are loaded: loads and unloads them while others serve."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple

from expertd.service.engine.errors import (
    EngineError,
    ExecutorClosedError,
    LoadFailedError,
    ModelUnloadedError,
    NotReadyError,
    RepositoryRefusedError,
    RepositoryUnavailableError,
)
from expertd.service.engine.executor import Executor
from expertd.service.engine.layers import LoadCancelledError, weights_ids
from expertd.service.engine.loading import LoadedLayers, Models
from expertd.service.engine.steps import Runner
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings

logger = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """A model's state with the protocol's names, and why it is not READY."""

    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str = ""


READY = ModelState("READY")
_UNLOADED = ModelState("UNAVAILABLE", "unloaded")


class Repository:
    """The states of all configured models, for the event loop. One model is loaded or unloaded at a time.

    on_unload    is called with the name of a model that has no requests any more, on the worker thread
    weights_ids  the identities of the weights of the models that have been loaded
    """

    def __init__(self, settings: Settings, executor: Executor) -> None:
        self.on_unload: Callable[[str], None] = lambda name: None
        self.weights_ids: dict[str, str] = {}
        self._settings = settings
        self._executor = executor
        self._models = {model.name: model for model in settings.models}
        self._states = {name: READY if model.load else _UNLOADED for name, model in self._models.items()}
        self._loaded: LoadedLayers | None = None
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._reader: threading.Thread | None = None
        executor.explain_missing(self._why_missing)

    def start(self, loaded: LoadedLayers, weights_ids: dict[str, str]) -> None:
        """The models that are loaded at start-up are there, with these identities."""
        self._loaded, self.weights_ids = loaded, weights_ids

    def close(self) -> None:
        """End what is going on: callers get ExecutorClosedError."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    @property
    def is_reading(self) -> bool:
        """Whether a thread reads weights; it may outlast `close`."""
        return self._reader is not None and self._reader.is_alive()

    def state(self, name: str) -> ModelState:
        """The state of a configured model."""
        return self._states[name]

    def serves(self, name: str) -> bool:
        """Whether a configured model is loaded, or was to be loaded at start-up."""
        return self._states[name] is READY

    def is_unloaded(self, name: str) -> bool:
        """Whether a configured model is meant not to be there: a failure to load it is not."""
        state = self._states[name]
        return state is _UNLOADED or state.state == "UNLOADING"

    def check(self, name: str) -> None:
        """Raise ModelUnloadedError if a configured model is not loaded, NotReadyError while it is loading."""
        if not self.serves(name):
            raise self._why_missing(name)

    def describe(self, name: str) -> str:
        """A model's state in words."""
        state = self._states[name]
        return state.reason or state.state.lower()

    async def load(self, name: str) -> None:
        """Load a configured model; returns when it is ready, at once if it was.

        Raises NotReadyError during start-up, RepositoryUnavailableError with several ranks or lanes,
        RepositoryRefusedError without memory for it, LoadFailedError, and ExecutorClosedError.
        """
        await self._run(self._load(self._models[name]))

    async def unload(self, name: str) -> None:
        """Unload a model, once all requests that it has accepted are answered. Raises as `load` does."""
        await self._run(self._unload(name))

    def _why_missing(self, name: str) -> EngineError:
        if self._states[name].state == "LOADING":
            return NotReadyError(f"model {name} is not ready: it is loading")
        return ModelUnloadedError(f"model {name}: expected a loaded one, got it {self.describe(name)}")

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self._check_possible()
        except BaseException:
            work.close()
            raise
        task = asyncio.get_running_loop().create_task(self._alone(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)  # a caller that no longer waits must not end the work
        except asyncio.CancelledError:
            if task.cancelled():
                raise ExecutorClosedError("the server is shutting down") from None
            raise

    def _check_possible(self) -> Models:
        if self._is_closed:
            raise ExecutorClosedError("the server is shutting down")
        if self._loaded is None:
            raise NotReadyError("the server is loading")
        if self._loaded.models is None:
            ranks = self._settings.num_ranks
            got = f"{ranks} ranks" if ranks > 1 else "lanes"
            expected = "a server of one rank without lanes to load and unload models at run time"
            if self._settings.has_budget:
                expected, got = "no weights_budget to load and unload models at run time", "one"
            raise RepositoryUnavailableError(f"repository: expected {expected}, got {got}")
        return self._loaded.models

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._one_at_a_time:
                await work
        finally:
            work.close()

    async def _load(self, model: ModelSettings) -> None:
        name, models, executor = model.name, self._check_possible(), self._executor
        if self.serves(name):
            return
        began, refusal = time.perf_counter(), None
        state, self._states[name] = self._states[name], ModelState("LOADING")
        try:
            executor.add_runner(name, await self._made(models, model), model.weight)
            state = READY
        except Exception as error:
            refusal = _refusal(name, error)
            if isinstance(refusal, LoadFailedError):
                state = ModelState("UNAVAILABLE", "loading failed")
        finally:
            self._states[name] = state
        if refusal is not None:  # outside the handler, whose error refers to the layer
            await executor.between_steps(models.collect)
            raise refusal
        logger.info("loaded model %s in %.1f s", name, time.perf_counter() - began)

    async def _made(self, models: Models, model: ModelSettings) -> Runner:
        await self._executor.between_steps(partial(models.check_memory, model))
        layer = await self._read(models, model)
        return await self._executor.between_steps(partial(models.add, model, layer))

    async def _read(self, models: Models, model: ModelSettings) -> Any:
        """The layer, read by a thread of its own that does not keep the process from ending."""
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # nobody can cancel it any more: the thread goes on

        def read() -> None:
            try:
                with self._executor.pausing_calls():
                    layer = models.read(model, lambda: self._is_closed)
                self.weights_ids.pop(model.name, None)  # files may have changed
                self.weights_ids.update(weights_ids([model]))
                done.set_result(layer)
            except BaseException as error:
                done.set_exception(error)

        self._reader = threading.Thread(target=read, name="expertd-loader", daemon=True)
        self._reader.start()
        return await asyncio.wrap_future(done)

    async def _unload(self, name: str) -> None:
        models, executor = self._check_possible(), self._executor
        if not self.serves(name):
            self._states[name] = _UNLOADED  # it may have failed to load
            return
        self._states[name] = ModelState("UNLOADING")
        executor.refuse_new(name)
        until = time.monotonic() + self._settings.drain_timeout_seconds
        try:
            while not await executor.between_steps(partial(self._remove, models, name)):
                if time.monotonic() > until:
                    executor.cancel_all(name)
        finally:
            self._states[name] = _UNLOADED
        await executor.between_steps(models.collect)
        logger.info("unloaded model %s", name)

    def _remove(self, models: Models, name: str) -> bool:
        """Forget the model, on the worker thread; False while requests wait for it."""
        if not self._executor.remove_runner(name):
            return False
        self.on_unload(name)
        models.remove(name)
        return True


def _refusal(name: str, error: Exception) -> EngineError:
    """The error that the caller gets when loading fails; the log has the details."""
    if isinstance(error, LoadCancelledError):
        return ExecutorClosedError("the server is shutting down")
    is_sentence = isinstance(error, (ValueError, OSError, MemoryError))
    logger.error("loading model %s failed: %s", name, str(error), exc_info=None if is_sentence else error)
    if isinstance(error, MemoryError):
        return RepositoryRefusedError(str(error))
    return LoadFailedError(f"model {name}: loading failed: see the server's log")
