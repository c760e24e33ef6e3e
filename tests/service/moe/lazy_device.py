"""A CPU that makes copies as late as events allow, and notes what was enqueued in which order."""

from collections.abc import Callable
from typing import Any

import torch

from expertd.service.device import Copies, Graph, GraphPool
from expertd.service.device.cpu import CpuDevice
from expertd.service.memory import Mapped, Unregister


class Log(list[tuple[Any, ...]]):
    """What was enqueued, in this order."""


class LoggedEvent:
    """Passes at once; says what recorded it, and who waits for it."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def record(self, stream: "LazyStream") -> None:
        self._log.append(("record", self, stream.name))
        stream.enqueue(lambda: None, self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class LazyStream:
    """Does nothing before another stream waits for it; the compute stream does all at once."""

    stream_id = 0

    def __init__(self, log: Log, name: str) -> None:
        self.name, self._log = name, log
        self._left: list[tuple[Callable[[], None], object]] = []
        self._others: list[LazyStream] = []

    def beside(self, other: "LazyStream") -> None:
        self._others.append(other)

    def enqueue(self, work: Callable[[], None], event: object = None) -> None:
        if self.name == "compute":
            work()
        else:
            self._left.append((work, event))

    def wait_event(self, event: Any) -> None:
        self._log.append(("wait", event, self.name))
        for other in self._others:
            other.run_to(event)

    def run_to(self, event: object) -> None:
        """All up to where the event was recorded last."""
        places = [place for place, (_, recorded) in enumerate(self._left) if recorded is event]
        for work, _ in self._left[: places[-1] + 1 if places else 0]:
            work()
        del self._left[: places[-1] + 1 if places else 0]

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class Replayed:
    """A graph whose replay is another call."""

    def __init__(self, work: Callable[[], object], log: Log) -> None:
        self._work, self._log = work, log

    @torch.inference_mode()
    def replay(self) -> None:
        self._log.append(("replay",))
        self._work()

    def reset(self) -> None: ...


class LazyPool:
    """Captures without a GPU."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def capture(self, work: Callable[[], object], stream: Any, as_part: bool = False) -> Graph:
        return Replayed(work, self._log)


class LazyDevice(CpuDevice):
    """A CPU whose copies are made as late as events allow, as on a GPU."""

    is_host = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log = Log()
        self.registered: list[Mapped] = []
        self.fails = False
        self._compute, self._copies = LazyStream(self.log, "compute"), LazyStream(self.log, "copies")
        self._compute.beside(self._copies)

    def new_stream(self, priority: int = 0) -> Any:
        return self._copies

    def current_stream(self) -> Any:
        return self._compute

    def new_event(self, timing: bool = False) -> Any:
        return LoggedEvent(self.log)

    def copy(self, copies: Copies, stream: Any) -> None:
        if self.fails:
            raise RuntimeError("the copy failed")
        made = [(to, source, size) for to, source, size in copies]
        self.log.append(("copy", [(to, size) for to, _, size in made]))
        stream.enqueue(lambda: super(LazyDevice, self).copy(copies, stream))

    def new_graph_pool(self) -> GraphPool:
        return LazyPool(self.log)

    def signal(self, address: int, value: int, stream: Any) -> None:
        self.log.append(("signal", value))

    @property
    def register(self) -> Callable[[Mapped], Unregister]:
        def register(memory: Mapped) -> Unregister:
            self.registered.append(memory)
            return lambda: self.registered.remove(memory)

        return register
