"""Answers that the device writes itself, before the server's thread has noticed the end of the step."""

import asyncio
import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from expertd.service.moe.request import LayerRequest, StepResult
from tests.service.apps import HIDDEN, rows
from tests.service.channels.peer import Peer
from tests.service.channels.servers import answer_to, channel_server, claimed
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
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server, num_slots=1)
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
        peer.close()


async def test_a_slot_is_used_again_before_the_server_has_noticed(tmp_path: Path) -> None:
    runner = SignallingRunner()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server, num_slots=1)
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
        peer.close()


async def test_times_are_never_those_of_an_earlier_request(tmp_path: Path) -> None:
    runner = SignallingRunner()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server, num_slots=1)
        await sent(peer, 1.0)
        invalid = peer.send(17, peer.places(1))
        runner.noticed.set()
        assert (await answer_to(peer, invalid)).status == 400
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 1)
        assert peer.words[(peer.starts[0] + 128) // 8 + 5] == invalid
        peer.close()


async def test_an_error_after_an_output_and_before_the_next(tmp_path: Path) -> None:
    """The status that the device announces is there before it, also after an error."""
    runner = SignallingRunner()
    runner.noticed.set()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server, num_slots=1)
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
        peer.close()


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
