"""Gives memory back to the system when large bodies no longer need it."""

import asyncio

from expertd.service.memory import Arena
from expertd.service.moe.host_memory import give_back_freed

PERIOD_SECONDS = 10.0
_BYTES_AT_ONCE = 16 * 1024**2  # a few milliseconds, in which nothing else runs
_PAUSE_SECONDS = 0.01


async def give_back_idle(arena: Arena) -> None:
    """Free what bodies and outputs have not used for a period, and what glibc keeps, until cancelled."""
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        arena.begin_period()
        freed = 0
        while num_bytes := arena.give_back(_BYTES_AT_ONCE):
            freed += num_bytes
            await asyncio.sleep(_PAUSE_SECONDS)
        if freed:
            await asyncio.to_thread(give_back_freed)
