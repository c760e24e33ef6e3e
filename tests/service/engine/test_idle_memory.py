"""Giving memory back goes on after an error, which the log has once."""

import asyncio
import logging
from contextlib import suppress

import pytest

from expertd.service.engine import idle_memory
from expertd.service.memory import Arena
from tests.service.waiting import until


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
