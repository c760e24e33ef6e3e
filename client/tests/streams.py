"""A stream without a GPU: work that a thread does in the order in which it was enqueued."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_registered: list[object] = []


class ThreadStream:
    """Implements `Stream`; `then` enqueues anything else. At its `end`, it does not wait any more."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        self._is_over = False
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def then(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def check(self) -> None:
        pass

    def register(self, memory: memoryview) -> int:
        held = ctypes.c_char.from_buffer(memory)
        _registered.append(held)  # work may be late: the mapping must not go before
        return ctypes.addressof(held)

    def write(self, address: int, value: int) -> None:
        def work() -> None:
            ctypes.c_uint64.from_address(address).value = value

        self.then(work)

    def wait(self, address: int, value: int) -> None:
        def work() -> None:
            while ctypes.c_uint64.from_address(address).value < value and not self._is_over:
                time.sleep(20e-6)

        self.then(work)

    def fill(self, array: Any) -> None:
        array[:] = np.nan

    def synchronize(self, seconds: float = 60.0) -> None:
        """Until all that was enqueued is done."""
        done = threading.Event()
        self.then(done.set)
        assert done.wait(seconds), "the stream still waits"
        assert self.errors == []

    def end(self) -> None:
        self._is_over = True
        self.then(lambda: setattr(self, "_is_ended", True))
        self._thread.join(60)

    def _run(self) -> None:
        while not getattr(self, "_is_ended", False):
            try:
                self._work.get()()
            except BaseException as error:
                self.errors.append(error)
