"""Answers that the device writes itself, before the server has noticed the step's end or a timeout."""

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
from tests.service.apps import HIDDEN, rows
from tests.service.channels.peer import Peer
from tests.service.channels.servers import answer_to, channel, channel_server, claimed
from tests.service.runners import Computed, EchoRunner
from tests.service.waiting import until


class Noticed(Computed):
    """A step whose outputs and signals are there at its begin; its end is noticed when `gate` opens."""

    def __init__(self, result: StepResult, gate: threading.Event) -> None:
        super().__init__(result)
        self._gate = gate

    def is_done(self) -> bool:
        return self._gate.is_set()

    def wait(self) -> float:
        self._gate.wait()
        return super().wait()


class SignallingRunner(EchoRunner):
    """Writes signals as a GPU does; `noticed` lets the server's thread see the ends of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.noticed = threading.Event()

    def begin(self, requests: Sequence[LayerRequest]) -> Computed:
        result = self._run(requests)
        for request in requests:
            if request.signal is not None:
                ctypes.c_uint64.from_address(request.signal.address).value = request.signal.value
        return Noticed(result, self.noticed)


async def sent(peer: Peer, value: float) -> int:
    """A request of 2 tokens of this value, once the device has answered it."""
    places = peer.places(peer.sequence + 1)
    peer.array(places[0], (2, HIDDEN), np.float32)[:] = value
    sequence = peer.send(2, places)
    await until(lambda: peer.answered(sequence))
    return sequence


async def test_an_output_is_there_before_the_server_has_noticed(tmp_path: Path) -> None:
    runner = SignallingRunner()
    async with channel(tmp_path, runner, request={"num_slots": 1}) as (server, peer):
        sequence = await sent(peer, 5.0)
        assert (peer.array(peer.places(1)[3], (2, HIDDEN), np.float32) == 5.0).all()
        start = peer.starts[0] + 128
        assert int.from_bytes(peer.control[start + 8 : start + 12], "little") == 200
        assert peer.words[start // 8 + 5] == 0, "the times are not known yet"
        runner.noticed.set()
        answer = await answer_to(peer, sequence)
        assert (answer.status, answer.compute_seconds) == (200, 0.001)
        assert answer.queue_seconds > 0
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 1)


async def test_a_slot_is_used_again_before_the_server_has_noticed(tmp_path: Path) -> None:
    runner = SignallingRunner()
    async with channel(tmp_path, runner, request={"num_slots": 1}) as (server, peer):
        places = peer.places(1)
        for turn in range(1, 4):
            runner.noticed.clear()
            await sent(peer, float(turn))
            peer.array(places[0], (2, HIDDEN), np.float32)[:] = -turn
            following = peer.send(2, places)
            runner.noticed.set()
            assert (await answer_to(peer, following)).status == 200
            assert (peer.array(places[3], (2, HIDDEN), np.float32) == -turn).all()
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 6)


async def test_times_are_never_those_of_an_earlier_request(tmp_path: Path) -> None:
    runner = SignallingRunner()
    async with channel(tmp_path, runner, request={"num_slots": 1}) as (server, peer):
        await sent(peer, 1.0)
        invalid = peer.send(17, peer.places(1))
        runner.noticed.set()
        assert (await answer_to(peer, invalid)).status == 400
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 1)
        assert peer.words[(peer.starts[0] + 128) // 8 + 5] == invalid


async def test_an_error_after_an_output_and_before_the_next(tmp_path: Path) -> None:
    """The status that the device announces is there before it, also after an error."""
    runner = SignallingRunner()
    runner.noticed.set()
    async with channel(tmp_path, runner, request={"num_slots": 1}) as (_, peer):
        for _ in range(3):
            runner.noticed.set()
            assert await asyncio.to_thread(peer.infer, rows(3)) is not None
            invalid = await answer_to(peer, peer.send(17, peer.places(1)))
            assert (invalid.status, invalid.error) == (400, "num_tokens: expected at most 16, got 17")
            runner.noticed.clear()
            sequence = await sent(peer, 1.0)
            start = peer.starts[0] + 128
            assert int.from_bytes(peer.control[start + 8 : start + 16], "little") == 200, "and no error bytes"
            runner.noticed.set()
            assert (await answer_to(peer, sequence)).status == 200


@pytest.mark.parametrize("with_next", [False, True])
async def test_a_channel_ends_before_the_server_has_noticed(tmp_path: Path, with_next: bool) -> None:
    runner = SignallingRunner()
    async with channel_server(tmp_path, runner) as server:
        peer, other = await claimed(server, num_slots=1), await claimed(server)
        await sent(peer, 5.0)
        if with_next:
            peer.send(2, peer.places(1))
        peer.close()
        await until(lambda: server.metric("channels") == 1)
        runner.noticed.set()
        assert (await asyncio.to_thread(other.infer, rows(2))).shape == (2, HIDDEN)
        other.close()


REQUESTS = 500  # of these, at least IN_TIME are answered in time, and LATE while their step runs on
IN_TIME, LATE = REQUESTS // 10, REQUESTS // 100


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
    """Its thread writes outputs and signals as a GPU does: most steps are short, others end at `timeout`."""

    def __init__(self, random: np.random.Generator, signals: bool) -> None:
        super().__init__()
        self.timeout = 3e-3
        self._random, self._signals = random, signals
        self._steps: queue.SimpleQueue[Running] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def begin(self, requests: Sequence[LayerRequest]) -> Running:  # type: ignore[override]
        long = self._random.random() < 0.4
        step = Running(requests, self.timeout + self._random.uniform(-1e-3, 1e-3) if long else 100e-6)
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


def hammer(peer: Peer, runner: DeviceRunner, count: int) -> Counter[str]:
    """Send requests as fast as slots are free, and check every answer; at least `count`.

    Where a busy machine is late for most timeouts, they become longer.
    """
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

    sent = 0
    while sent < count or outcomes["200"] <= IN_TIME or outcomes["late"] <= LATE:
        sent += 1
        if sent % 100 == 0 and outcomes["200"] <= outcomes.total() // 5:
            runner.timeout = min(2 * runner.timeout, 1.0)
        if len(open_requests) == peer.num_slots:
            settle(open_requests.popleft())
        places = peer.places(peer.sequence + 1)
        peer.array(places[0], (2, HIDDEN), np.float32)[:] = peer.sequence + 1
        open_requests.append(peer.send(2, places, timeout=runner.timeout))
    while open_requests:
        settle(open_requests.popleft())
    return outcomes


@pytest.mark.parametrize(("num_slots", "signals"), [(1, True), (3, True), (3, False)])
async def test_no_answer_is_lost_or_wrong(
    tmp_path: Path, num_slots: int, signals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "step", lambda self, num_tokens: 0.0)  # else most are refused at once
    runner = DeviceRunner(np.random.default_rng(num_slots), signals)
    async with channel(tmp_path, runner, request={"num_slots": num_slots}) as (server, peer):
        outcomes = await asyncio.to_thread(hammer, peer, runner, REQUESTS)

        def counted() -> float:
            return sum(
                server.metric("requests_total", model="tiny", status=status) for status in ("200", "503")
            )

        await until(lambda: counted() == outcomes.total())
