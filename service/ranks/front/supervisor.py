"""Keeps a group of ranks running: starts them, starts them again when one is lost, and ends them."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.metrics.ranks import RankDevice
from expertd.service.memory import HIDDEN, DeviceMemory, Mapped, Span, Unregister, check_handle
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.front.rank import Inbox, Rank
from expertd.service.ranks.front.starting import RankLoadError, share, start_ranks, wait_loaded
from expertd.service.ranks.nodes.board import Nodes
from expertd.service.ranks.placement import PlacementStore, group_store
from expertd.service.ranks.regions import Exported, SharedRegion, SharedRegions
from expertd.service.ranks.rendezvous import listen_for_ranks, open_store
from expertd.service.ranks.setup import RankSetup, Role
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_STEADY_SECONDS = 10.0  # ranks that ran for this long start again with the first pause
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0  # seconds before ranks that fail at once start again


class PresentRanks:
    """The group of `num_ranks` ranks that runs steps. Safe from any thread.

    starts  of each rank, so far
    """

    def __init__(self, num_ranks: int) -> None:
        self.regions = SharedRegions()
        self.starts = [0] * num_ranks
        self._serving: RankGroup | None = None  # runs steps
        self._group: RankGroup | None = None  # maps regions
        self._why = "the ranks are starting"
        self._mapping = threading.Lock()  # a region is added, or a group gets all of them

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

    def are_up(self) -> list[bool]:
        """Whether each rank runs steps."""
        present = self._present()
        return [number in present for number in range(len(self.starts))]

    def devices(self) -> list[RankDevice]:
        """What is known of each rank's device; nothing of ranks that are lost."""
        present, unknown = self._present(), RankDevice()
        return [
            present[number].device if number in present else unknown for number in range(len(self.starts))
        ]

    def register(self, memory: Mapped) -> Unregister:
        """Share memory with the ranks, also with those that are started later. Raises RuntimeError."""
        return self._share(memory, of_caller=False)[1]

    def register_file(self, memory: Mapped) -> Unregister:
        """As `register`, for a caller's file. Raises also DeviceLostError."""
        return self._share(memory, of_caller=True)[1]

    def open_cuda(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """Have all ranks open a caller's GPU memory; see `OpenCuda`. Raises ValueError, DeviceLostError."""
        check_handle(handle)
        try:
            region, close = self._share(Exported(handle, num_bytes), of_caller=True)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return DeviceMemory(Span(region.address, num_bytes, HIDDEN), close, handle)

    def _share(self, memory: Mapped | Exported, of_caller: bool) -> tuple[SharedRegion, Unregister]:
        with self._mapping:
            region, group = self.regions.add(memory, of_caller), self._group
            try:
                if group is not None:
                    group.map([region])
                elif of_caller:
                    raise DeviceLostError(self._why)
            except DeviceLostError:
                if of_caller:  # it may be the cause
                    self.regions.remove(region)
                    raise
                # The next ones map it.
            except BaseException:
                self.regions.remove(region)
                assert group is not None
                with suppress(DeviceLostError):
                    group.unmap(region)  # those that could
                raise

        def unregister() -> None:
            with self._mapping:
                self.regions.remove(region)
                if self._group is not None:
                    with suppress(DeviceLostError):
                        self._group.unmap(region)

        return region, unregister

    def _present(self) -> dict[int, Rank]:
        group = self._serving
        if group is None or group.lost is not None:
            return {}
        return {rank.number: rank for rank in group.ranks}


class Supervisor(PresentRanks):
    """The ranks of a server, from `start` to `stop`. Safe from any thread."""

    def __init__(self, settings: Settings, placements: PlacementStore | None = None) -> None:
        super().__init__(settings.num_ranks)
        self.partitions = settings.partitions  # of ranks to come
        self._settings = settings
        self._placements = placements
        self._rendezvous, self._listener = listen_for_ranks(settings)
        self._inbox = Inbox()
        self._generation = 0  # of the last group
        self._has_served = False
        self._stopped = False
        self._failure: RankLoadError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="expertd-ranks", daemon=True)

    def start(self, cancelled: Callable[[], bool]) -> tuple[str, str, list[Any]] | None:
        """Start the ranks; the backend, device and partitions of the first, once all have loaded.

        All have the same. None if `cancelled` came first. Raises RankLoadError.
        """
        self._thread.start()
        with self._changed:
            while self._serving is None and self._failure is None and not cancelled():
                self._changed.wait(0.05)
            if self._failure is not None:
                raise self._failure
            if self._serving is None:
                return None
            first = self._serving.ranks[0]
            assert first.about is not None
            assert first.answer is not None
            return *first.about, first.answer[1]

    def stop(self) -> None:
        """End the ranks, after their present steps."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._inbox.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._store = open_store(self._rendezvous, self._listener)
            nodes = Nodes(self._settings, self._rendezvous) if self._settings.nnodes > 1 else None
            pause = _FIRST_PAUSE
            while not self._stopped:
                began = time.monotonic()
                try:
                    self._run_all(nodes)
                except Exception as error:
                    if not self._has_served:
                        raise
                    self._note(why=f"the ranks could not be started again: {error}")
                    is_expected = isinstance(error, RankLoadError | OSError | RuntimeError)
                    logger.error("%s", self._why, exc_info=None if is_expected else error)
                steady = time.monotonic() - began > _STEADY_SECONDS
                pause = _FIRST_PAUSE if steady else min(2 * pause, _LAST_PAUSE)
                self._pause(pause)
        except RankLoadError as error:
            self._note(failure=error)
        except Exception as error:
            is_expected = isinstance(error, OSError)
            if not is_expected:
                logger.exception("the ranks cannot be started")
            why = f"the ranks cannot be started: {error}"
            self._note(failure=RankLoadError(why, is_expected), why=why)

    def _run_all(self, nodes: Nodes | None) -> None:
        """Start all ranks, and run steps until all have to start again, or `stop`.

        Raises RankLoadError, OSError, RuntimeError.
        """
        began, generation, is_first = time.monotonic(), self._begin_generation(), not self._has_served
        if nodes is not None:
            nodes.wait_present(lambda: self._stopped, is_first)
            if self._stopped:
                return
            nodes.begin(generation)
        why_nodes_lost = (lambda: None) if nodes is None else nodes.why_lost
        timeout = self._settings.step_timeout_seconds
        ranks = start_ranks(self._setups(), self._inbox)
        group = RankGroup(generation, ranks, self._inbox, timeout, why_nodes_lost)
        try:
            wait_loaded(ranks, self._inbox, lambda: self._stopped, why_nodes_lost)
            if self._stopped:
                return
            self._open(group)
            if not is_first:
                logger.info("the ranks are ready again, after %.1f s", time.monotonic() - began)
            while not self._stopped and group.lost is None:
                group.look()
            if self._stopped:
                group.lose("the server is shutting down")
            else:
                self._note(why=f"{group.lost}; the ranks are starting again")
                logger.error("%s", self._why)
        finally:
            with self._mapping:
                self._group = None
            if self._stopped and group is self._serving:
                group.stop()
            else:
                group.end()

    def _open(self, group: RankGroup) -> None:
        """Have a group map all regions, also those to come, and run steps. Raises RankLoadError."""
        with self._mapping:
            share(group.ranks, self._inbox, self.regions, lambda: self._stopped)
            self._group = group
        self._has_served = True
        self._note(serving=group)

    def _begin_generation(self) -> int:
        """The number of the next group, which finds the placements in its part of the store."""
        self._generation += 1
        if self._placements is not None:
            self._placements.begin(self._generation, group_store(self._store, self._generation))
        return self._generation

    def _setups(self) -> list[RankSetup]:
        """The setups of all ranks, those of other nodes with a proxy."""
        settings = self._settings.model_copy(update={"partitions": self.partitions})
        setups = []
        for number in range(settings.num_ranks):
            role = Role.HERE if number < settings.ranks_per_node else Role.PROXY
            setups.append(RankSetup(settings, number, self._rendezvous, self._generation, role))
            self.starts[number] += 1
        return setups

    def _note(
        self, serving: RankGroup | None = None, why: str = "", failure: RankLoadError | None = None
    ) -> None:
        with self._changed:
            self._serving, self._why, self._failure = serving, why or self._why, failure
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)
