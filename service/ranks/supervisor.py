"""Keeps a group of ranks running: starts them, starts them again when one is lost, and ends them."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.rank_metrics import RankDevice
from expertd.service.memory import Mapped, Unregister
from expertd.service.ranks.group import LoadFailedError, RankGroup
from expertd.service.ranks.meeting import LOOPBACK, Meeting, between_nodes, exposure, listen, on_this_machine
from expertd.service.ranks.nodes import Nodes
from expertd.service.ranks.placements import PlacementStore, group_store
from expertd.service.ranks.regions import SharedRegions
from expertd.service.ranks.setup import RankSetup, Role
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LAST_PAUSE = (
    0.1,
    5.0,
)  # seconds before ranks that fail at once start again
_STEADY_SECONDS = 10.0  # ranks that ran for this long start again with the first pause


class Supervisor:
    """The ranks of a server, from `start` to `stop`. Safe from any thread."""

    def __init__(self, settings: Settings, placements: PlacementStore | None = None) -> None:
        self._placements = placements
        self.regions = SharedRegions()
        self.starts = 0  # of groups, so far
        self.partitions = settings.partitions  # of those to come
        self._settings = settings
        self._meeting, self._listener = _meeting(settings)
        self._group: RankGroup | None = None  # maps regions
        self._serving: RankGroup | None = None  # runs steps
        self._why = "the ranks are starting"
        self._stopped = False
        self._failure: LoadFailedError | None = None
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None  # the thread, where it waits for ranks
        self._mapping = threading.Lock()  # a region is added, or a group gets all of them
        self._thread = threading.Thread(target=self._run, name="expertd-ranks", daemon=True)

    def start(self, cancelled: Callable[[], bool]) -> tuple[str, str, list[Any]] | None:
        """Start the ranks; `RankGroup.about` once they have loaded, None if `cancelled` came first.

        Raises LoadFailedError.
        """
        self._thread.start()
        with self._changed:
            while self._serving is None and self._failure is None and not cancelled():
                self._changed.wait(0.05)
            if self._failure is not None:
                raise self._failure
            return None if self._serving is None else self._serving.about

    def group(self) -> RankGroup:
        """The ranks that run steps. Raises DeviceLostError while there are none."""
        group = self._serving
        if group is None:
            raise DeviceLostError(self._why)
        group.check()
        return group

    def why_not(self) -> str | None:
        """Why no step can run at present; None: it can."""
        group = self._serving
        return self._why if group is None else group.lost

    def devices(self) -> list[RankDevice]:
        """What is known of each rank's device; nothing while the ranks are lost."""
        group = self._serving
        if group is None:
            return [RankDevice()] * self._settings.num_ranks
        return [rank.device for rank in group.ranks]

    def register(self, memory: Mapped) -> Unregister:
        """Share memory with the ranks, also with those that are started later. Raises RuntimeError."""
        with self._mapping:
            region, group = self.regions.add(memory), self._group
            try:
                if group is not None:
                    group.map([region])
            except DeviceLostError:
                pass  # the next ones map it
            except BaseException:
                self.regions.remove(region)
                raise

        def unregister() -> None:
            with self._mapping:
                self.regions.remove(region)
                if self._group is not None:
                    self._group.unmap(region)

        return unregister

    def stop(self) -> None:
        """End the ranks, after their present steps."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._open_store()
            nodes = Nodes(self._settings, self._meeting) if self._settings.nnodes > 1 else None
            pause = _FIRST_PAUSE
            while not self._stopped:
                began = time.monotonic()
                try:
                    self._run_group(nodes)
                except (LoadFailedError, OSError, RuntimeError) as error:
                    if self.starts == 1:
                        raise
                    self._note(why=f"the ranks could not be started again: {error}")
                    logger.error("%s", self._why)
                steady = time.monotonic() - began > _STEADY_SECONDS
                pause = _FIRST_PAUSE if steady else min(2 * pause, _LAST_PAUSE)
                self._pause(pause)
        except LoadFailedError as error:
            self._note(failure=error)
        except Exception as error:
            logger.exception("the ranks cannot be started")
            self._note(
                failure=LoadFailedError(str(error), False), why=f"the ranks cannot be started: {error}"
            )

    def _open_store(self) -> None:
        """Open a store for the ranks, which outlives them, rank 0 too. Raises RuntimeError."""
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._meeting.host,
            self._meeting.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
            master_listen_fd=self._listener.detach(),
        )  # its server ends with it

    def _run_group(self, nodes: Nodes | None) -> None:
        """Run one group until it is lost, or `stop`. Raises LoadFailedError, OSError, RuntimeError."""
        self.starts += 1
        began = time.monotonic()
        if self._placements is not None:
            self._placements.begin(self.starts, group_store(self._store, self.starts))
        if nodes is not None:
            nodes.wait_present(lambda: self._stopped, is_first=self.starts == 1)
            if self._stopped:
                return
            nodes.begin(self.starts)
        why_lost = (lambda: None) if nodes is None else nodes.why_lost
        group = RankGroup(self._setups(), self._settings.step_timeout_seconds, why_lost)
        try:
            self._wake = group.wake
            group.wait_loaded(lambda: self._stopped)
            if self._stopped:
                return
            watcher = threading.Thread(target=group.watch, args=(lambda: self._stopped,), daemon=True)
            watcher.start()
            self._share_all(group)
            self._note(serving=group)
            if self.starts > 1:
                logger.info("the ranks are ready again, after %.1f s", time.monotonic() - began)
            watcher.join()
            if not self._stopped:
                self._note(why=f"{group.lost}; the ranks are starting again")
                logger.error("%s", self._why)
        finally:
            with self._mapping:
                self._group = None
            if self._stopped and group is self._serving:
                group.stop()
            else:
                group.end()

    def _setups(self) -> list[RankSetup]:
        """What each rank of the next group is started with, those of other nodes by a proxy."""
        settings = self._settings.model_copy(update={"partitions": self.partitions})
        here = settings.ranks_per_node
        roles = [Role.HERE] * here + [Role.PROXY] * (settings.num_ranks - here)
        return [
            RankSetup(settings, rank, self._meeting, self.starts, role) for rank, role in enumerate(roles)
        ]

    def _share_all(self, group: RankGroup) -> None:
        """Have a new group map all regions, also those to come. Raises LoadFailedError."""
        with self._mapping:
            try:
                group.map(self.regions.all())
            except (DeviceLostError, RuntimeError) as error:
                raise LoadFailedError(str(error), False) from error
            self._group = group

    def _note(
        self, serving: RankGroup | None = None, why: str = "", failure: LoadFailedError | None = None
    ) -> None:
        with self._changed:
            self._serving, self._why, self._failure = serving, why or self._why, failure
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)


def _meeting(settings: Settings) -> tuple[Meeting, socket.socket]:
    """Where the ranks meet, and a socket there for the store. Raises ValueError."""
    if settings.nnodes > 1:
        meeting = between_nodes(settings)
        if (warning := exposure(meeting)) is not None:
            logger.warning(warning)
        return meeting, listen(meeting.host, meeting.port)
    listener = listen(LOOPBACK, 0)
    return on_this_machine(listener.getsockname()[1]), listener
