"""The ranks that run steps at present, for all threads of the front end, and the memory that they share."""

import threading
from contextlib import suppress

from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.metrics.ranks import RankDevice
from expertd.service.memory import HIDDEN, DeviceMemory, Mapped, Span, Unregister, check_handle
from expertd.service.ranks.group import RankGroup
from expertd.service.ranks.rank import Rank
from expertd.service.ranks.regions import Exported, Region, SharedRegions


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

    def _share(self, memory: Mapped | Exported, of_caller: bool) -> tuple[Region, Unregister]:
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
