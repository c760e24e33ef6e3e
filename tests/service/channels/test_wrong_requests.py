"""Callers that break the rules: an error in the slot, or the end of that channel, and of no other."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.service.channels.geometry import Geometry
from expertd.service.channels.memory import SealedMemory
from expertd.service.channels.requests import ChannelModel, ChannelRequestError, RequestReader
from expertd.service.moe.request import Signal
from expertd_client.channel.layout import REQUEST
from tests.service.apps import HIDDEN, TOP_K, hidden_request, output_of, rows
from tests.service.channels.peer import ChannelClosedError, Peer
from tests.service.channels.servers import answer_to, channel, channel_server, claimed
from tests.service.runners import EchoRunner, Turnstile
from tests.service.waiting import until

SIZE = 64 * 1024
REGION: dict[str, Any] = {"memory": {"system": {"byte_size": SIZE}}}
FP32, BF16 = 3, 1
GOOD = (2, FP32, FP32, 0, 0, 0, 0, 0, 8192, 0, 0)
FIELDS = ("num_tokens", "datatype", "output_datatype", "flags", "timeout_us")
OFFSETS = ("hidden_states", "topk_ids", "topk_weights", "output")


def line(**changes: int) -> bytes:
    names = (*FIELDS, *OFFSETS, "priority", "model")
    return REQUEST.pack(*({**dict(zip(names, GOOD, strict=True)), **changes}.values()))


WRONG = {
    "num_tokens: expected at most 16, got 17": {"num_tokens": 17},
    "num_tokens: expected at most 16, got 4294967295": {"num_tokens": 2**32 - 1},
    "datatype: expected 1, 2, 3 or 4, got 0": {"datatype": 0},
    "datatype: expected 1, 2, 3 or 4, got 255": {"datatype": 255},
    "output_datatype: expected 1, 2 or 3, got 4": {"output_datatype": 4},
    "flags: expected 0 to 3, got 4": {"flags": 4},
    "priority: expected at most 255, got 256": {"priority": 256},
    "model: expected a number below 1, got 1": {"model": 1},
    "hidden_states: expected an offset that is a multiple of 64, got 8": {"hidden_states": 8},
    "output: expected an offset that is a multiple of 64, got 8200": {"output": 8200},
    "hidden_states: expected 1024 bytes inside the region of 65536, got the offset 65472": {
        "hidden_states": SIZE - 64
    },
    "hidden_states: expected 1024 bytes inside the region of 65536, got the offset 18446744073709551552": {
        "hidden_states": 2**64 - 64
    },
    "output: expected 1024 bytes inside the region of 65536, got the offset 64576": {"output": SIZE - 960},
    "output: expected 512 bytes inside the region of 65536, got the offset 65088": {
        "output": SIZE - 448,
        "output_datatype": BF16,
    },
    "topk_ids: expected 16 bytes inside the region of 65536, got the offset 65536": {
        "flags": 1,
        "topk_ids": SIZE,
    },
    "topk_weights: expected an offset that is a multiple of 64, got 1": {"flags": 1, "topk_weights": 1},
    "output: expected a place apart from hidden_states, got one that overlaps it": {"output": 960},
    "output: expected a place apart from topk_ids, got one that overlaps it": {"flags": 1, "topk_ids": 8192},
    "output: expected a place apart from topk_weights, got one that overlaps it": {
        "flags": 1,
        "topk_weights": 9152,
    },
    "topk_ids: expected 0 to 3, got a larger one": {"flags": 1, "topk_ids": 2048},
}


async def test_every_wrong_line_is_an_error_in_its_slot(tmp_path: Path) -> None:
    async with channel(tmp_path, EchoRunner(), request=REGION) as (
        _,
        peer,
    ):
        peer.array(2048, (2, TOP_K), np.int32)[:] = 4
        peer.array(0, (2, HIDDEN), np.float32)[:] = 0
        for text, changes in WRONG.items():
            for data, expected in ((line(**changes), (400, text)), (line(), (200, ""))):
                peer.sequence += 1
                peer.write(peer.sequence, data)
                answer = await answer_to(peer, peer.sequence)
                assert (answer.status, answer.error) == expected


async def test_errors_end_no_wait_of_a_stream(tmp_path: Path) -> None:
    """A stream waits for the answer's sequence, so an error has another place; the channel goes on."""
    async with channel(tmp_path, EchoRunner(), request=REGION) as (
        _,
        peer,
    ):
        peer.array(0, (2, HIDDEN), np.float32)[:] = 0
        for text, changes in WRONG.items():
            flags = changes.get("flags", 0) | 2
            if text.startswith(("topk_ids: expected 0", "flags")):
                continue
            peer.sequence += 1
            peer.write(peer.sequence, line(**{**changes, "flags": flags}))
            await until(lambda: peer.has_failed(peer.sequence))
            assert not peer.answered(peer.sequence)
            peer.sequence += 1
            peer.write(peer.sequence, line(flags=2))
            await until(lambda: peer.answered(peer.sequence))  # nobody rings
            assert (await answer_to(peer, peer.sequence)).status == 200
            assert not peer.has_failed(peer.sequence)


async def test_requests_that_are_written_after_their_ring(tmp_path: Path) -> None:
    """As a GPU writes them when its stream gets there: announced, rung, and written later."""
    async with channel(tmp_path, EchoRunner(), request=REGION) as (
        _,
        peer,
    ):
        peer.array(0, (2, HIDDEN), np.float32)[:] = 0
        for number in range(1, 40):
            word = peer.announce(number, line(flags=2))
            for _ in range(number % 4):
                await asyncio.sleep(0.5e-3)
                assert not peer.answered(number)
            peer.words[word] = number
            await until(lambda number=number: peer.answered(number))  # type: ignore[misc]
            assert (await answer_to(peer, number)).status == 200


lines = st.builds(
    line,
    num_tokens=st.integers(0, 20) | st.integers(0, 2**32 - 1),
    datatype=st.integers(0, 4),
    output_datatype=st.integers(0, 4),
    flags=st.sampled_from((0, 1, 1, 2, 3, 4)),
    timeout_us=st.integers(0, 2**64 - 1),
    priority=st.sampled_from((0, 1, 255, 256)),
    model=st.sampled_from((0, 0, 0, 1)),
    **{name: st.integers(0, 1200).map(lambda n: n * 64) | st.integers(0, 2**64 - 1) for name in OFFSETS},
)


@settings(max_examples=500)
@given(lines | st.binary(min_size=REQUEST.size, max_size=REQUEST.size))
def test_any_line_is_refused_or_stays_inside_the_region(data: bytes) -> None:
    with region() as memory:
        model = ChannelModel("tiny", HIDDEN, TOP_K, EchoRunner().validate, True)
        reader = RequestReader(Geometry.for_slots(1, 16, HIDDEN, TOP_K, 4).within(SIZE), memory.span, [model])
        num_tokens, _, _, flags, *_ = REQUEST.unpack(data)
        try:
            read = reader.line(data)
            assert num_tokens <= 16
            assert (read.topk_ids is not None) == bool(flags & 1)
            used = [read.hidden_states, *(part for part in (read.topk_ids, read.topk_weights) if part)]
            for part in (*used, read.output):
                assert part.view is not None
                assert part.num_bytes == len(part.view)
                assert memory.span.address <= part.address
                assert part.address + part.num_bytes <= memory.span.address + SIZE
            written = range(read.output.address, read.output.address + read.output.num_bytes)
            for part in used:
                if part.num_bytes and written:
                    assert part.address >= written.stop or part.address + part.num_bytes <= written.start
            if read.num_tokens:
                reader.request(read, Signal(0))
        except ChannelRequestError:
            pass  # refused


@contextmanager
def region() -> Iterator[SealedMemory]:
    memory = SealedMemory("expertd-test", SIZE)
    yield memory
    memory.close()


def skip_one(peer: Peer) -> None:
    peer.write(2, line())
    peer.write(1 + peer.num_slots * 5, line())


def count_backwards(peer: Peer) -> None:
    peer.write(2**64 - peer.num_slots + 1, line())


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (skip_one, "sequence of slot 0: expected 1, got 21"),
        (count_backwards, "sequence of slot 0: expected 1, got 18446744073709551613"),
    ],
)
async def test_a_wrong_sequence_ends_the_channel_and_no_other(
    tmp_path: Path, lie: object, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(lie)
    runner = EchoRunner()
    async with channel_server(tmp_path, runner) as server:
        liar = await claimed(server, **REGION)
        honest = await claimed(server)
        runner.gate.clear()
        sequence = honest.send(1, honest.places(1))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        lie(liar)
        runner.gate.set()
        with pytest.raises(ChannelClosedError):
            await answer_to(liar, 100 * liar.num_slots)
        assert (await answer_to(honest, sequence)).status == 200
        await asyncio.to_thread(honest.infer, rows(3))
        await until(lambda: server.metric("channels") == 1)
        liar.close()
        honest.close()
    assert f"channel 1 of model tiny: {text}" in caplog.text


async def test_a_slot_used_again_before_its_answer_ends_the_channel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = EchoRunner()
    runner.gate = gate = Turnstile()
    async with channel_server(tmp_path, runner, {"max_batch_tokens": 64}) as server:
        first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        full_step = asyncio.ensure_future(server.infer(*hidden_request(rows(64))))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        liar = await claimed(server, num_slots=1, **REGION)
        liar.write(1, line())
        gate.let_one_through()
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        liar.write(2, line())  # while request 1 is in the queue
        gate.set()
        output_of(await first)
        output_of(await full_step)
        with pytest.raises(ChannelClosedError):
            await answer_to(liar, 2)
        await until(lambda: server.metric("channels") == 0)
        liar.close()
    assert "channel 1 of model tiny: slot 0: expected request 2 after answer 1" in caplog.text


async def test_whatever_a_caller_writes_into_the_memory_others_are_served(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    async with channel_server(tmp_path, EchoRunner()) as server:
        honest = await claimed(server)
        for _ in range(30):
            liar = await claimed(server)
            for _ in range(20):
                start = int(random.integers(0, len(liar.control) - 64))
                liar.control[start : start + 64] = random.bytes(64)
                liar.ring()
            await asyncio.to_thread(honest.infer, rows(2))
            liar.close()
        await until(lambda: server.metric("channels") == 1)
        honest.close()
