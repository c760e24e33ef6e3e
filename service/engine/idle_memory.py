"""Gives memory back to the system when large bodies no longer need it."""

import asyncio
import logging

from expertd.service.memory import Arena
from expertd.service.util.heap import give_back_freed

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0
_BYTES_AT_ONCE = 16 * 1024**2  # a few milliseconds, in which nothing else runs
_PAUSE_SECONDS = 0.01


async def give_back_idle(arena: Arena) -> None:
    """Free what bodies and outputs have not used for a period, and what glibc keeps, until cancelled."""
    has_failed = False
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        try:
            await _give_back(arena)
        except OSError as error:
            if not has_failed:  # what fails once may fail every time
                logger.warning("memory of large bodies is not given back: %s", error)
            has_failed = True


async def _give_back(arena: Arena) -> None:
    arena.begin_period()
    freed = 0
    while num_bytes := arena.give_back(_BYTES_AT_ONCE):
        freed += num_bytes
        await asyncio.sleep(_PAUSE_SECONDS)
    if freed:
        await asyncio.to_thread(give_back_freed)
