"""Applications whose layers are shared by ranks, and what tests need to know of their processes."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from expertd.service.engine.loading import LoadedLayers, load
from expertd.service.engine.steps import Runner
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.front.loading import load_ranks
from expertd.service.ranks.messages import StepEnd
from expertd.service.ranks.setup import MAX_SENT
from expertd.service.settings.model import Settings
from tests.families import HIDDEN
from tests.service.apps import Serving, hidden_request, output_of, rows, serving
from tests.service.children import children_of

ROUNDING = 2**-7
"""Between one rank and several, relative to the largest element.

The order of FP32 additions differs, so an intermediate result may round to the next number in bf16 and FP8.
"""


@asynccontextmanager
async def serving_ranks(settings: Settings) -> AsyncIterator[Serving]:
    """As `serving`, with ranks; checks that none is left."""
    async with serving(settings, load_ranks) as server:
        assert server.app.engine.loaded is not None, "loading failed: see the log"
        started = rank_processes()
        yield server
    assert not set(started) & set(rank_processes())


def rank_processes(of: int | None = None) -> list[int]:
    """The ranks that are children of the process `of`, None: this one, in the order of their numbers."""
    return children_of(of, "expertd.service.ranks.process")


def cpu_seconds(processes: list[int]) -> float:
    """The processor time that processes have used."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


async def output_for(server: Serving, values: NDArray[np.float32], **more: Any) -> NDArray[np.float32]:
    """The output of the model "tiny" for `values`."""
    return output_of(await server.infer(*hidden_request(values, **more)))


def watch_steps(monkeypatch: pytest.MonkeyPatch, begun: Callable[[int], None]) -> None:
    """Call `begun` after ranks were sent a step, with the number of those that they have."""
    numbers = set[int]()
    begin, wait = RankGroup.begin, RankGroup.wait

    def watched_begin(group: RankGroup, number: int, command: bytes) -> None:
        begin(group, number, command)
        numbers.add(number)
        begun(len(numbers))

    def watched_wait(group: RankGroup, number: int) -> dict[int, StepEnd]:
        try:
            return wait(group, number)
        finally:
            numbers.discard(number)

    monkeypatch.setattr(RankGroup, "begin", watched_begin)
    monkeypatch.setattr(RankGroup, "wait", watched_wait)


async def check_steps_at_once(server: Serving, one: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a step each, three of which the ranks have at a time, are answered as by `one`."""
    counts = list[int]()
    watch_steps(monkeypatch, counts.append)
    await output_for(server, rows(1000))  # what such a step takes is known then
    requests = [rows(1000, seed) for seed in range(12)]
    answers = await asyncio.gather(*[output_for(server, values) for values in requests])
    for values, answer in zip(requests, answers, strict=True):
        assert close(answer, await output_for(one, values))
    assert max(counts) == MAX_SENT


def computed(settings: Settings, hidden: int = HIDDEN) -> NDArray[np.float32]:
    """The output of the only model for 5 tokens, without a server; with ranks if there are several."""
    with _loaded(settings) as loaded:
        (runner,) = loaded.runners.values()
        return _output(runner, hidden)


def computed_by_all(settings: Settings) -> dict[str, NDArray[np.float32]]:
    """As `computed`, of several models by their names."""
    with _loaded(settings) as loaded:
        return {
            model.name: _output(loaded.runners[model.name], model.hidden_size) for model in settings.models
        }


@contextmanager
def _loaded(settings: Settings) -> Iterator[LoadedLayers]:
    loaded = (load if settings.num_ranks == 1 else load_ranks)(settings, lambda: False)
    try:
        yield loaded
    finally:
        loaded.close()


def _output(runner: Runner, hidden: int) -> NDArray[np.float32]:
    hidden_states = rows(10).reshape(-1)[: 5 * hidden].tobytes()
    request = LayerRequest(5, hidden_states, "FP32", None, "INT32", None, "FP32")
    return np.frombuffer(bytes(runner.begin([request]).finish().outputs[0]), np.float32)  # type: ignore[arg-type]


def close(got: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """Whether they differ by rounding only."""
    return bool(np.abs(got - expected).max() <= ROUNDING * np.abs(expected).max())
