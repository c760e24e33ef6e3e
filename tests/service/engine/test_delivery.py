"""Reports reach the event loop, however many wait."""

import asyncio
import time

import pytest

from expertd.service.engine.delivery import Delivery


@pytest.mark.parametrize("count", [8, 3000])
async def test_reports_let_other_threads_run_a_few_times_however_many_wait(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time may take 0.2 ms and more: else the event loop would be late by a second."""
    times = [0]
    most = 0

    def slept(seconds: float) -> None:
        times[-1] += 1

    monkeypatch.setattr(time, "sleep", slept)
    delivery, seen = Delivery(), list[int]()
    delivery.start()
    for number in range(count):
        delivery.report_later(lambda number=number: seen.append(number))  # type: ignore[misc]
    delivery.deliver([])
    while len(seen) < count:
        before = times[-1]
        await asyncio.sleep(0)
        most = max(most, times[-1] - before)
    assert seen == list(range(count))
    assert 0 < most < 20
