"""SM partitions of ranks: the same on every rank, replaced on all of them or on none."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.loading import LoadedLayers
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.setup import PARTITIONS

logger = logging.getLogger(__name__)


class RankPartition(NamedTuple):
    """See `Partition`."""

    name: str
    requested_sms: int
    num_sms: int


def shown(loaded: LoadedLayers) -> list[Any]:
    """What a rank says of its partitions, for JSON; empty if its device cannot be partitioned."""
    device = loaded.partitions
    if device is None:
        return []
    named = [[each.name, each.requested_sms, each.num_sms] for each in device.partitions]
    return [device.device_name, device.total_sms, device.granularity, named]


def replace(loaded: LoadedLayers, sizes: Mapping[str, int] | None) -> tuple[str, list[Any]]:
    """On a rank, between two steps: an error, "" if there is none, and what the rank has then.

    sizes  None: they have been replaced on all ranks, which now prepare steps together. If that fails, the
           rank does, too: without its graphs it would launch what the others do not
    """
    if loaded.partitions is None:
        expected = "a backend whose device has SMs to partition"
        return f"partitions: expected {expected}, got {loaded.backend!r}", []
    if sizes is None:
        loaded.prepare_steps(lambda: False)
        return "", shown(loaded)
    try:
        loaded.partitions.apply(sizes)
    except Exception as error:
        logger.debug("partitions were refused", exc_info=error)
        return str(error), shown(loaded)
    return "", shown(loaded)


class RankPartitions:
    """The partitions of all ranks, for the front end; see `Partitions`. It shows those of rank 0.

    group  the ranks that run steps; raises DeviceLostError
    first  what rank 0 said when it had loaded
    keep   called with the sizes for ranks that start again
    """

    def __init__(
        self, group: Callable[[], RankGroup], first: Sequence[Any], keep: Callable[[dict[str, int]], None]
    ) -> None:
        self._group, self._keep = group, keep
        self._note(first)

    def apply(self, sizes: Mapping[str, int]) -> Sequence[RankPartition]:
        """Replace the partitions of all ranks between two steps.

        Raises ValueError if one refuses the sizes, and DeviceLostError if one is lost: then all have the old
        ones, or start again with them.
        """
        group = self._group()
        before = {each.name: each.requested_sms for each in self.partitions}
        answers = group.ask(PARTITIONS, dict(sizes))
        errors = [f"rank {rank}: {error}" for rank, (error, _) in sorted(answers.items()) if error]
        if errors and len(errors) < len(answers):
            undone = group.ask(PARTITIONS, before)
            if wrong := [error for error, _ in undone.values() if error]:
                group.lose(f"partitions differ between ranks: {wrong[0]}")
                raise DeviceLostError(wrong[0])
        if len(errors) < len(answers):
            group.ask(PARTITIONS, None)
        if errors:
            same = {error for error, _ in answers.values()}
            raise ValueError(same.pop() if len(same) == 1 else errors[0])
        self._keep(dict(sizes))
        self._note(answers[min(answers)][1])
        return self.partitions

    def _note(self, said: Sequence[Any]) -> None:
        self.device_name: str
        self.total_sms: int
        self.granularity: int
        self.device_name, self.total_sms, self.granularity, named = said
        self.partitions: Sequence[RankPartition] = tuple(RankPartition(*each) for each in named)
