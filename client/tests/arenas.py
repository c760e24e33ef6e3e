"""Arenas without memory, for tests of who gets which place."""

import threading

from expertd_client.arenas import ArenaOpening, CallArena, Holder, Lease, Need, Sizes


class Memory(CallArena):
    """Remembers who uses which place."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.is_alive = True
        self.is_closed = False
        self.abandoned: list[int] = []
        self.answered: set[int] = set()
        self.in_use = [threading.Lock() for _ in range(sizes.num_places)]

    def is_usable(self) -> bool:
        return self.is_alive

    def abandon(self, place: int, request: int) -> None:
        self.abandoned.append(place)

    def reclaim(self) -> bool:
        for place in [place for place in self.abandoned if place in self.answered]:
            self.abandoned.remove(place)
            self.free.append(place)
        return not self.abandoned

    def break_off(self) -> None:
        self.is_alive = False

    def close(self) -> None:
        assert not self.is_closed
        assert self.users == 0
        self.is_closed = True


def never() -> None:
    raise AssertionError("nothing to wake for")


def leased(holder: Holder[Memory], need: Need) -> Lease[Memory]:
    """A place, opening an arena if the holder asks for one."""
    found = holder.take(need, never)
    if isinstance(found, ArenaOpening):
        holder.opened(Memory(found.sizes[0]))
        found = holder.take(need, never)
    assert isinstance(found, Lease)
    return found


SMALL, LARGE = Need(1, 2048), Need(500, 500 * 2048)
