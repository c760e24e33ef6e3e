"""Ranks from their start until they have loaded and mapped the memory that they share."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from expertd.service.ranks.front.rank import Inbox, Rank
from expertd.service.ranks.regions import SharedRegion, SharedRegions
from expertd.service.ranks.setup import RankSetup

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
_MAP_SECONDS, _MAP_SECONDS_PER_BYTE = 60.0, 1e-9  # locking memory for a GPU takes about 0.3 s for each GB
_AT_ONCE = 64  # messages that a rank has not answered: its socket has room for some 200


class RankLoadError(Exception):
    """A rank could not load; is_expected: the text is a sentence about the settings or files."""

    def __init__(self, text: str, is_expected: bool) -> None:
        super().__init__(text)
        self.is_expected = is_expected


def start_ranks(setups: Sequence[RankSetup], inbox: Inbox) -> list[Rank]:
    """Start all of these, or none. Raises OSError."""
    ranks: list[Rank] = []
    try:
        for setup in setups:
            ranks.append(Rank(setup, inbox.bell))
    except BaseException:
        end_ranks(ranks)
        raise
    return ranks


def end_ranks(ranks: Sequence[Rank]) -> None:
    """End them at once."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.end()


def wait_loaded(
    ranks: Sequence[Rank], inbox: Inbox, stop: Callable[[], bool], why_nodes_lost: Callable[[], str | None]
) -> None:
    """Return once all ranks have loaded, or `stop` is true. Raises RankLoadError.

    why_nodes_lost  says why ranks of other nodes are lost; asked often
    """
    while not stop() and not all(rank.about for rank in ranks):
        check_loading(ranks, inbox, LOOK_SECONDS)
        if (why := why_nodes_lost()) is not None:
            raise RankLoadError(f"loading: {why}", False)


def check_loading(ranks: Sequence[Rank], inbox: Inbox, seconds: float) -> None:
    """Hear ranks that load, at most for `seconds`. Raises RankLoadError if one is lost."""
    why = inbox.take(ranks, seconds)
    for rank in ranks:
        if rank.failure is not None:
            raise RankLoadError(*rank.failure)
    gone = next((gone for rank in ranks if (gone := rank.why_gone()) is not None), None)
    if gone is not None and not inbox.has_news(ranks):  # one that has ended may have said why
        why = gone
    if why is not None:
        raise RankLoadError(f"loading: {why}", False)


def map_seconds(regions: Sequence[SharedRegion]) -> float:
    """Seconds that ranks have to map or to close these."""
    return _MAP_SECONDS + _MAP_SECONDS_PER_BYTE * sum(region.memory.num_bytes for region in regions)


def share(ranks: Sequence[Rank], inbox: Inbox, shared: SharedRegions, stop: Callable[[], bool]) -> None:
    """Have ranks, which nobody else hears, map these regions and no other.

    A caller's region that a rank cannot map is lost. Raises RankLoadError, also once `stop` is true.
    """
    regions = shared.all()
    numbers = {region.number for region in regions}
    left: dict[Rank, deque[Callable[[], None]]] = {}
    for rank in ranks:
        old = [partial(rank.unmap, number) for number in rank.mapped.keys() - numbers]
        left[rank] = deque([*old, *(partial(rank.map, region) for region in regions)])
    seconds = map_seconds(regions)
    until = time.monotonic() + seconds
    while any(left.values()) or any(rank.num_unanswered for rank in ranks):
        for rank, work in left.items():
            for _ in range(min(len(work), _AT_ONCE - rank.num_unanswered)):
                work.popleft()()
        check_loading(ranks, inbox, LOOK_SECONDS)
        if stop():
            raise RankLoadError("loading: the server is shutting down", False)
        if time.monotonic() > until:
            raise RankLoadError(f"loading: expected memory to be mapped within {seconds:g} s", False)
    for region in regions:
        errors = {rank.number: error for rank in ranks if (error := rank.mapped[region.number])}
        for number, error in errors.items():
            if not region.of_caller:
                raise RankLoadError(f"rank {number}: {error}", False)
            logger.warning("rank %d cannot access a caller's memory any more: %s", number, error)
        shared.note(region, next(iter(errors.values()), None))
