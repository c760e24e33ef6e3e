"""Many timeouts that pass at about the time at which a device answers by itself."""

import asyncio
import ctypes
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from expertd.service.engine.forecast import Forecast
from expertd.service.moe.request import LayerRequest, StepResult
from tests.service.apps import HIDDEN
from tests.service.channels.peer import Peer
from tests.service.channels.servers import channel_server, claimed
from tests.service.runners import EchoRunner
from tests.service.waiting import until

TIMEOUT = 3e-3
REQUESTS = 1000


class Running:
    """A step of the device thread, from its begin on."""

    def __init__(self, requests: Sequence[LayerRequest], seconds: float) -> None:
        self.requests = requests
        self.end = time.perf_counter() + seconds
        self.ended = threading.Event()
        self.result: StepResult | None = None

    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> float:
        return self.finish().compute_seconds

    def finish(self) -> StepResult:
        self.ended.wait()
        assert self.result is not None
        return self.result


class DeviceRunner(EchoRunner):
    """Its thread writes outputs and signals as a GPU does: most steps are short, the rest end at TIMEOUT."""

    def __init__(self, random: np.random.Generator, signals: bool) -> None:
        super().__init__()
        self._random, self._signals = random, signals
        self._steps: queue.SimpleQueue[Running] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def begin(self, requests: Sequence[LayerRequest]) -> Running:  # type: ignore[override]
        long = self._random.random() < 0.4
        step = Running(requests, TIMEOUT + self._random.uniform(-1e-3, 1e-3) if long else 100e-6)
        self._steps.put(step)
        return step

    def _work(self) -> None:
        while True:
            step = self._steps.get()
            time.sleep(max(0.0, step.end - time.perf_counter()))
            step.result = self._run(step.requests)
            for request in step.requests:
                if self._signals and request.signal is not None:
                    ctypes.c_uint64.from_address(request.signal.address).value = request.signal.value
            step.ended.set()


def hammer(peer: Peer, count: int) -> Counter[str]:
    """Send requests as fast as slots are free, and check every answer."""
    outcomes: Counter[str] = Counter()
    open_requests: deque[int] = deque()

    def settle(sequence: int) -> None:
        in_time = peer.is_in_time(sequence)
        answer = peer.wait(sequence)  # the slot is free
        outcomes[str(answer.status) if in_time else "late"] += 1
        assert answer.status == 200 or (answer.status == 503 and "timeout" in answer.error), answer
        if answer.status == 200:
            output = peer.array(peer.places(sequence)[3], (2, HIDDEN), np.float32)
            assert (output == sequence).all(), sequence

    for _ in range(count):
        if len(open_requests) == peer.num_slots:
            settle(open_requests.popleft())
        places = peer.places(peer.sequence + 1)
        peer.array(places[0], (2, HIDDEN), np.float32)[:] = peer.sequence + 1
        open_requests.append(peer.send(2, places, timeout=TIMEOUT))
    while open_requests:
        settle(open_requests.popleft())
    return outcomes


@pytest.mark.parametrize(("num_slots", "signals"), [(1, True), (3, True), (3, False)])
async def test_no_answer_is_lost_or_wrong(
    tmp_path: Path, num_slots: int, signals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "step", lambda self, num_tokens: 0.0)  # else most are refused at once
    runner = DeviceRunner(np.random.default_rng(num_slots), signals)
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server, num_slots=num_slots)
        outcomes = await asyncio.to_thread(hammer, peer, REQUESTS)
        assert outcomes.total() == REQUESTS
        assert outcomes["200"] > REQUESTS // 10
        assert outcomes["late"] > REQUESTS // 100

        def counted() -> float:
            return sum(
                server.metric("requests_total", model="tiny", status=status) for status in ("200", "503")
            )

        await until(lambda: counted() == REQUESTS)
        peer.close()
