"""Waiting for a place in memory that calls share: in a thread, and in an event loop."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable

from expertd_client.arenas import A, Holder, Lease, Need, Sizes
from expertd_client.deadline import Deadline

_MAX_SECONDS = 1e6


def take_place(
    holder: Holder[A], need: Need, deadline: Deadline, open_arena: Callable[[Sizes], object]
) -> Lease[A] | None:
    """A place; None if `open_arena` returned None: then another holder may be the right one.

    Raises what `open_arena` does, NotThisCallError and DeadlineError.
    """
    while True:
        turn = threading.Lock()
        turn.acquire()
        found = holder.take(need, turn.release)
        if isinstance(found, Lease):
            return found
        if isinstance(found, Sizes):
            if open_arena(found) is None:
                return None
            continue
        woken = False
        try:
            left = min(deadline.check(), _MAX_SECONDS)
            woken = turn.acquire(timeout=min(left, found.seconds or left))
        finally:
            if not woken:
                holder.forget(turn.release)


async def take_place_async(
    holder: Holder[A], need: Need, deadline: Deadline, open_arena: Callable[[Sizes], Awaitable[object]]
) -> Lease[A] | None:
    """`take_place` in an event loop."""
    loop = asyncio.get_running_loop()
    while True:
        turn: asyncio.Future[None] = loop.create_future()

        def wake(turn: "asyncio.Future[None]" = turn) -> None:
            if not turn.done():
                turn.set_result(None)

        found = holder.take(need, wake)
        if isinstance(found, Lease):
            return found
        if isinstance(found, Sizes):
            if await open_arena(found) is None:
                return None
            continue
        try:
            left = deadline.check()
            await asyncio.wait((turn,), timeout=None if math.isinf(left) else left)
        finally:
            if not turn.done():
                holder.forget(wake)
