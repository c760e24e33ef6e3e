"""The process group that a rank is in, and its place among the members."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.distributed_c10d import Store

from expertd.service.moe.parallel import (
    Alone,
    Exchange,
    ExchangeError,
    ParallelLayer,
    TorchExchange,
    join_group,
    leave_group,
)
from expertd.service.ranks.members import MET, MeetCommand
from expertd.service.ranks.messages import ERROR_BYTES
from expertd.service.ranks.setup import RankSetup, Role

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1e-3
_TIMEOUT_SECONDS = 3600.0  # for ranks that load more slowly; the front end ends those whose peers are gone


class Membership:
    """One rank's. Without `on_rank_loss: shrink` it meets all others at once, for good. Raises ExchangeError.

    With it, ranks load on their own, and meet when the front end says so; then some may be missing.
    """

    def __init__(self, setup: RankSetup, store: Store) -> None:
        self._setup = setup
        self._members: Sequence[int] = range(setup.num_ranks)
        self._meets_later = setup.settings.on_rank_loss == "shrink"
        if not self._meets_later:
            self._join(store)

    @property
    def place(self) -> tuple[int, int]:
        """(k, n): the rank is the k-th of n members."""
        return self._members.index(self._setup.rank), len(self._members)

    @property
    def share(self) -> tuple[int, int]:
        """(k, n): the rank computes the k-th of n parts of a command's rows."""
        return (0, 1) if self._setup.role is Role.REMOTE else self.place  # a proxy sends a rank's rows only

    def exchange(self) -> Exchange:
        """For a layer that is loaded."""
        return Alone(self._setup.rank, self._setup.num_ranks) if self._meets_later else TorchExchange()

    def meet(
        self, command: MeetCommand, layers: Iterable[ParallelLayer], is_called: Callable[[], bool]
    ) -> tuple[str, int, str]:
        """Go over to another group with these layers, between two steps; what to tell the front end.

        is_called  whether there is something else to do, so that waiting for the others has to end
        """
        try:
            leave_group()
            self._members = command.members
            store = self._setup.meeting.store(str(command.generation))
            self._await_members(store, is_called)
            self._join(store)
            exchange = TorchExchange()
            with torch.inference_mode():
                for layer in layers:
                    layer.meet(exchange, command.members)
        except Exception as error:
            logger.debug("meeting failed", exc_info=error)
            return MET, command.generation, f"{type(error).__name__}: {error}"[:ERROR_BYTES]
        return MET, command.generation, ""

    def _await_members(self, store: Store, is_called: Callable[[], bool]) -> None:
        """Wait until all are there: joining itself cannot be ended from outside. Raises ExchangeError."""
        store.set(f"here/{self._setup.rank}", "1")
        while not store.check([f"here/{rank}" for rank in self._members]):
            if is_called():
                raise ExchangeError("meeting: expected all members, got a call to leave")
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Leave the group, so that exchanges of members that wait for this rank fail."""
        leave_group()

    def _join(self, store: Store) -> None:
        settings, (place, count) = self._setup.settings, self.place
        # GPUs of one node exchange no tensors by it.
        backend = "gloo" if settings.devices is None or settings.nnodes == 1 else "nccl"
        join_group(store, place, count, timeout_seconds=_TIMEOUT_SECONDS, backend=backend)
