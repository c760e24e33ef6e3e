"""Runners of real layers whose steps a test can hold, so that requests compete."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from expertd.service.engine.loading import LoadedLayers, Loader
from expertd.service.engine.steps import Runner, Step
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.model import Settings
from tests.service.apps import Serving, hidden_request, rows
from tests.service.waiting import until

T = TypeVar("T")
CHUNKS = {"prefill_chunk_tokens": 16}


class HeldRunner:
    """Another runner, whose steps wait while it is closed; `steps` has the tokens of their requests."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._closed = False
        self._tickets = threading.Semaphore(0)
        self.steps: list[list[int]] = []

    def close(self) -> None:
        """Let further steps wait."""
        self._closed = True

    def let(self, count: int) -> None:
        """Let this many steps begin."""
        self._tickets.release(count)

    def open(self) -> None:
        """Let all steps begin."""
        self._closed = False
        self.let(1)

    def validate(self, request: LayerRequest) -> None:
        self._runner.validate(request)

    def begin(self, requests: Sequence[LayerRequest]) -> Step:
        self.steps.append([request.num_tokens for request in requests])
        if self._closed:
            assert self._tickets.acquire(timeout=60)
        return self._runner.begin(requests)


def holding(load: Loader) -> tuple[Loader, list[HeldRunner]]:
    """`load`, with a HeldRunner for each model; they are listed once it has loaded."""
    held: list[HeldRunner] = []

    def loader(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
        loaded = load(settings, cancelled)
        held.extend(HeldRunner(runner) for runner in loaded.runners.values())
        return replace(loaded, runners=dict(zip(loaded.runners, held, strict=True)))

    return loader, held


@asynccontextmanager
async def competing(server: Serving, runner: HeldRunner) -> AsyncIterator[None]:
    """Requests that are sent in this block wait together, behind a step of one token and beside one more."""
    runner.close()
    before = len(runner.steps)
    small = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
    await until(lambda: len(runner.steps) > before)
    other = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
    await until(lambda: waiting(server) == 1)
    try:
        yield
    finally:
        runner.open()
    for each in (small, other):
        assert (await each).status_code == 200


def waiting(server: Serving) -> float:
    """The requests in the queue."""
    return server.metric("queue_requests", model="tiny")


async def in_chunks(server: Serving, runner: HeldRunner, sends: Callable[[], Awaitable[T]]) -> T:
    """The answer to a request of 64 tokens, which is computed in 4 chunks."""
    before = len(runner.steps)
    async with competing(server, runner):
        answer = asyncio.ensure_future(_sent(sends))
        await until(lambda: waiting(server) == 2)
    got = await answer
    assert runner.steps[before:] == [[1], [1], [16], [16], [16], [16]]
    return got


@asynccontextmanager
async def polled(server: Serving) -> AsyncIterator[None]:
    """Channels are read in this block, though a test holds the worker thread, which does so between steps."""

    async def poll() -> None:
        while True:
            await asyncio.sleep(0.001)
            server.app.engine.executor.poll_sources()

    task = asyncio.ensure_future(poll())
    try:
        yield
    finally:
        task.cancel()


async def _sent(sends: Callable[[], Awaitable[T]]) -> T:
    return await sends()
