"""`benchmarks.lanes_server` without a GPU: its steps only take time, and leave the processor alone.

So what the host does for each step is seen on any machine, with lanes as on a GPU: one thread for both. Steps
of the decode lane take 0.25 ms, those of the prefill lane 0.8 ms, about as Qwen3-30B's on 40 and 92 SMs of an
H200. Outputs are not written.
"""

import os
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from benchmarks import lanes_server
from expertd.layout import Layout
from expertd.service.engine.lanes import Lanes
from expertd.service.moe.request import LayerRequest, Output, StepResult
from expertd.service.moe.runner import LayerRunner

SHORT_TOKENS = 8  # up to which a step is the decode lane's
SHORT_SECONDS, LONG_SECONDS = 0.25e-3, 0.8e-3
SPIN_SECONDS = 1e-3  # as a server with a GPU
_LAUNCHES = 2  # of a step: calls that give the interpreter's lock away


class Step:
    """A step that is over at a time."""

    _free: ClassVar[dict[bool, float]] = {}  # when each lane has done its steps

    def __init__(self, requests: Sequence[LayerRequest]) -> None:
        self._requests = requests
        self._num_tokens = sum(request.num_tokens for request in requests)
        is_long = self._num_tokens > SHORT_TOKENS
        self._began = max(time.perf_counter(), self._free.get(is_long, 0.0))
        self._end = self._free[is_long] = self._began + (LONG_SECONDS if is_long else SHORT_SECONDS)

    def is_done(self) -> bool:
        return time.perf_counter() >= self._end

    def wait(self) -> float:
        while (left := self._end - time.perf_counter()) > 0:
            time.sleep(left)
        return self._end - self._began

    def finish(self) -> StepResult:
        outputs: list[Output] = [request.output or b"" for request in self._requests]
        count = self._num_tokens
        seconds = self.wait()
        return StepResult(outputs, Layout.CONTIGUOUS, count, lambda: np.full(8, count // 4), seconds)


def main() -> None:
    """As `lanes_server.main`."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    set_device = Lanes.set_device

    def begin(runner: LayerRunner, requests: Sequence[LayerRequest]) -> Step:
        for _ in range(_LAUNCHES):
            os.write(nothing, b"-")
        return Step(requests)

    def set_gpu(lanes: Lanes, spin_seconds: float, leaves_cpu: bool) -> None:
        set_device(lanes, SPIN_SECONDS, leaves_cpu=True)

    setattr(LayerRunner, "begin", begin)  # noqa: B010
    setattr(Lanes, "set_device", set_gpu)  # noqa: B010
    lanes_server.main()


if __name__ == "__main__":
    main()
