"""Records the steps of one layer, which run here and for nobody else, without a server."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import torch

from expertd import __version__
from expertd.service.engine.engine import Engine
from expertd.service.engine.errors import NotReadyError
from expertd.service.engine.loading import Loader, load
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.profiling import Recording
from expertd.service.engine.steps import Submission
from expertd.service.moe.request import LayerRequest, OutputMemory
from expertd.service.moe.step.batch import FLOATS
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings

_WARM_UP_STEPS = 10  # caches, clocks, and graphs of sizes that recur


async def profile_steps(
    settings: Settings, steps: int, num_tokens: int, seconds: float, loader: Loader = load
) -> Recording:
    """Load the only model of `settings`, run steps of `num_tokens` tokens one by one, and record `steps`.

    The hidden states are normal, and differ from step to step; the layer routes them. A few steps before
    those are not recorded, and take `seconds` seconds at most, as do these.

    Raises NotReadyError if the model does not load (the log says why), and other EngineErrors as
    `Profiling.record`, or if a step fails.
    """
    (model,) = settings.models
    engine = Engine(settings, Metrics(__version__), loader)
    engine.start()
    try:
        await engine.wait_loaded()
        if (why_not := engine.why_not_ready()) is not None:
            raise NotReadyError(f"model {model.name}: expected it to load, got an error ({why_not})")
        requests = _requests(model, num_tokens, _WARM_UP_STEPS + steps)

        async def run(count: int) -> None:
            for _ in range(count):
                await _step(engine, model.name, next(requests))

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await run(_WARM_UP_STEPS)
        return await engine.profile(steps, seconds, lambda: run(steps))
    finally:
        await engine.stop()


def _requests(model: ModelSettings, num_tokens: int, count: int) -> Iterator[LayerRequest]:
    """Requests whose tokens are rows of one buffer; each begins a row further."""
    generator = torch.Generator().manual_seed(0)
    size = (num_tokens + count, model.hidden_size)
    rows = torch.randn(size, dtype=torch.float32, generator=generator)
    data = rows.to(FLOATS[model.datatype]).view(torch.uint8).numpy()
    for first in range(count):
        hidden_states = data[first : first + num_tokens].data.cast("B")
        yield LayerRequest(num_tokens, hidden_states, model.datatype, None, "INT32", None, model.datatype)


async def _step(engine: Engine, model: str, request: LayerRequest) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(output: OutputMemory | Exception) -> None:
        if done.done():  # cancelled
            return
        if isinstance(output, Exception):
            done.set_exception(output)
        else:
            done.set_result(None)

    engine.submit(Submission(model, request, answer))
    await done
