"""Failures that are no request's: loading that fails late, memory that is refused or not given back."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertd.service.engine import idle_memory
from expertd.service.engine.engine import Phase
from expertd.service.engine.loading import LoadedLayers
from expertd.service.memory import Arena, Mapped
from expertd.service.settings.model import Settings
from tests.service.apps import error_of, serving, serving_runner, tiny_settings
from tests.service.runners import EchoRunner
from tests.service.waiting import until


def failing(*_: object) -> Any:
    raise RuntimeError("a GPU of clay")


@pytest.mark.parametrize("late", ["register", "prepare_thread", "metrics"])
async def test_it_is_logged_and_what_is_loaded_is_closed(
    late: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = threading.Semaphore(0)

    def loader(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
        loaded = replace(serving_runner(EchoRunner())(settings, cancelled), close=closed.release)
        changes: dict[str, Any] = {} if late == "metrics" else {late: failing}
        return replace(loaded, **changes)

    if late == "metrics":
        monkeypatch.setattr("expertd.service.engine.metrics.Metrics.set_backend", failing)
    with caplog.at_level(logging.ERROR):
        async with serving(tiny_settings(), loader) as server:
            engine = server.app.engine
            assert engine.phase is Phase.FAILED
            assert (engine.loaded, engine.arena) == (None, None)
            error_of(await server.http.get("/v2/health/ready"), 503)
    assert "loading failed: a GPU of clay" in caplog.text
    assert closed.acquire(blocking=False)
    assert not closed.acquire(blocking=False), "once"


def test_memory_that_cannot_be_registered_is_closed() -> None:
    def refused(memory: Mapped) -> Callable[[], None]:
        files.append(Path(f"/proc/self/fd/{memory.descriptor}"))
        assert "expertd-arena" in str(files[0].readlink())
        return failing()  # type: ignore[no-any-return]

    files = list[Path]()
    with pytest.raises(RuntimeError, match="of clay"):
        Arena(1, refused)
    assert not files[0].is_symlink() or "expertd-arena" not in str(files[0].readlink())


async def test_an_error_is_logged_once_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = list[int]()

    class Failing(Arena):
        def give_back(self, num_bytes: int) -> int:
            tries.append(num_bytes)
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(idle_memory, "PERIOD_SECONDS", 0.001)
    task = asyncio.ensure_future(idle_memory.give_back_idle(Failing(1)))
    with caplog.at_level(logging.WARNING):
        await until(lambda: len(tries) > 2)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert [record.getMessage() for record in caplog.records] == [
        "memory of large bodies is not given back: [Errno 12] Cannot allocate memory"
    ]
