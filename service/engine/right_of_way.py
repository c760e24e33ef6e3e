"""What a lane's worker thread does for those of other lanes.

The interpreter has one lock for all threads. One that waits for it sleeps, and may wake up 0.3 ms late, as
long as a decode step takes. So while a request may come to the first lane, the threads of others leave the
lock to its thread, and do their work while its step runs on the device: until then, it has nothing to do.
"""

import math
import threading
import time
from collections.abc import Callable

from expertd.service.engine.wakeup import Source

_RECENT_SECONDS = 2e-3  # after the first lane's last step began: the next request is likely to come soon
_MOST_SECONDS = 1e-3  # of a wait
_LAUNCH_SECONDS = 0.4e-3  # at most, to give the device more to do


class Others:
    """The other lanes' threads, for a thread without any."""

    def set_device(self, leaves_cpu: bool) -> None:
        """Say whether steps leave the CPU alone."""

    def leaves(self, source: Source) -> bool:
        """Whether this thread leaves it to another one to poll `source`."""
        return False

    def step_runs(self) -> None:
        """A step has been launched."""

    def step_ended(self) -> None:
        """A step that this thread waited for has ended."""

    def give_way(self, busy: Callable[[], float]) -> None:
        """Wait, for a short time, until Python code on this thread delays no other.

        busy  seconds until the device has done what this thread has launched
        """


class RightOfWay:
    """The first lane's, where steps leave the CPU alone: `enabled`."""

    def __init__(self) -> None:
        self.enabled = False
        self.step_runs = threading.Event()
        self.began = -math.inf  # its last step


class Slower(Others):
    """The other lanes, for the first lane's thread; are_asleep: whether their threads sleep."""

    def __init__(self, way: RightOfWay, are_asleep: Callable[[], bool]) -> None:
        self._way, self._are_asleep = way, are_asleep

    def set_device(self, leaves_cpu: bool) -> None:
        self._way.enabled = leaves_cpu

    def leaves(self, source: Source) -> bool:
        return source.lane > 0 and not self._are_asleep()

    def step_runs(self) -> None:
        self._way.began = time.perf_counter()
        self._way.step_runs.set()

    def step_ended(self) -> None:
        self._way.step_runs.clear()


class Faster(Others):
    """The first lane, for the thread of another one."""

    def __init__(self, way: RightOfWay) -> None:
        self._way = way

    def leaves(self, source: Source) -> bool:
        return source.lane == 0

    def give_way(self, busy: Callable[[], float]) -> None:
        way = self._way
        if way.enabled and time.perf_counter() - way.began < _RECENT_SECONDS and not way.step_runs.is_set():
            seconds = min(_MOST_SECONDS, busy() - _LAUNCH_SECONDS)
            if seconds > 0:
                way.step_runs.wait(seconds)
