"""Which ranks go on when others are lost: those that have left their steps, if they hold every expert."""

import logging
import time

from expertd.service.ranks.group import RankGroup
from expertd.service.ranks.inbox import Inbox
from expertd.service.ranks.placements import PlacementStore
from expertd.service.ranks.rank import Rank
from expertd.service.ranks.setup import LEAVE
from expertd.service.ranks.starting import LOOK_SECONDS, end_ranks

logger = logging.getLogger(__name__)

_GONE_SECONDS = (
    0.2  # from the first sign that a rank is lost, such as a step that fails, to its process's end
)
_LEAVE_SECONDS = 3.0  # for the present step; its exchanges fail as soon as the lost ranks have ended


def survivors_of(group: RankGroup, inbox: Inbox, placements: PlacementStore) -> list[Rank]:
    """The ranks of a lost group that can meet again, in no step any more; the others are ended.

    Empty if all have to start again: because nobody knows which rank is lost, because an expert has no
    replica on the others, or because these are not sure to hold the same placements.
    """
    lost = _lost_of(group)
    staying = [rank for rank in group.ranks if rank not in lost]
    if not lost or not _hold_all(staying, placements):
        return []
    end_ranks(lost)  # so that exchanges with them end
    left = _leave(staying, inbox)
    end_ranks([rank for rank in staying if rank not in left])
    if not _hold_all(left, placements):
        return []
    digest = placements.digest()
    if any(rank.left != digest for rank in left):  # some had switched when they lost the others
        logger.warning("the ranks that are left hold different placements: all start again")
        return []
    return left


def _lost_of(group: RankGroup) -> list[Rank]:
    until = time.monotonic() + _GONE_SECONDS
    while True:
        lost = [rank for rank in group.ranks if rank.number in group.failed or rank.why_gone() is not None]
        if lost or time.monotonic() > until:
            return lost
        time.sleep(LOOK_SECONDS / 5)


def _leave(ranks: list[Rank], inbox: Inbox) -> list[Rank]:
    """Have ranks leave their group; those that have done so in time."""
    for rank in ranks:
        rank.left = None
        rank.send(LEAVE)
    staying = ranks
    until = time.monotonic() + _LEAVE_SECONDS
    while any(rank.left is None for rank in staying) and time.monotonic() < until:
        inbox.take(staying, LOOK_SECONDS)
        staying = [rank for rank in staying if rank.why_gone() is None]
    return [rank for rank in staying if rank.left is not None]


def _hold_all(ranks: list[Rank], placements: PlacementStore) -> bool:
    return bool(ranks) and placements.are_held_by([rank.number for rank in ranks])
