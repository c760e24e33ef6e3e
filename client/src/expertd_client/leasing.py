"""Waiting for a place in memory that calls share."""

from collections.abc import Callable

from expertd_client.arenas import A, ArenaOpening, Holder, Lease, Need
from expertd_client.deadline import Deadline
from expertd_client.semaphore import Until, Waker
from expertd_client.steps import Steps


def take_place(
    holder: Holder[A], need: Need, deadline: Deadline, open_arena: Callable[[ArenaOpening], Steps[object]]
) -> Steps[Lease[A] | None]:
    """A place; None if `open_arena` returned None: then another holder may be the right one.

    Raises what `open_arena` does, NotThisCallError and DeadlineError.
    """
    while True:
        deadline.check()
        signal = Waker()
        found = holder.take(need, signal.set)
        if isinstance(found, Lease):
            return found
        if isinstance(found, ArenaOpening):
            if (yield from open_arena(found)) is None:
                return None
            continue
        woken = False
        try:
            woken = yield Until(signal, deadline, found.seconds)
        finally:
            if not woken:
                holder.forget(signal.set)
