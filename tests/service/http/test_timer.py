"""A deadline that moves."""

import asyncio

from expertd.service.http.timer import Timer
from tests.service.virtual_time import in_virtual_time


@in_virtual_time
async def test_it_fires_once_after_the_last_deadline() -> None:
    loop, fired = asyncio.get_running_loop(), list[float]()
    timer = Timer(loop)
    for _ in range(2):
        timer.set(10, lambda: fired.append(loop.time()))
        await asyncio.sleep(9)
    assert fired == []
    await asyncio.sleep(200)
    assert fired == [19]


@in_virtual_time
async def test_an_earlier_deadline_is_kept_and_a_cleared_one_never_fires() -> None:
    fired = list[str]()
    timer = Timer(asyncio.get_running_loop())
    timer.set(75, lambda: fired.append("idle"))
    timer.set(10, lambda: fired.append("head"))
    await asyncio.sleep(100)
    assert fired == ["head"]
    timer.set(1, lambda: fired.append("cleared"))
    timer.clear()
    await asyncio.sleep(2)
    timer.set(1, lambda: fired.append("closed"))
    timer.close()
    await asyncio.sleep(2)
    timer.set(1, lambda: fired.append("set again"))
    await asyncio.sleep(2)
    assert fired == ["head", "set again"]
