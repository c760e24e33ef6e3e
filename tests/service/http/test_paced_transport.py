"""A large answer is sent in pieces, between which other connections go on."""

import asyncio

import pytest

from expertd.service.http.paced_transport import YIELD_BYTES, PlainTransport
from tests.service.http.pipe import Pipe, Told

ANSWER = bytes(range(256)) * 40_000  # 10 MB


class Session:
    """A transport over a pipe, and a record of what its owner is told."""

    def __init__(self) -> None:
        self.pipe, self.told = Pipe(), Told()
        loop = asyncio.get_running_loop()
        self.transport = PlainTransport(self.pipe, loop, self.told)  # type: ignore[arg-type]
        self.pipe.transport = self.transport


async def test_a_fast_client_does_not_keep_others_waiting() -> None:
    this = Session()
    this.transport.write(b"head")
    this.transport.write(memoryview(ANSWER))
    before = 4
    while this.told.said != ["paused", "resumed"]:
        sent = len(this.pipe.sent)
        assert before < sent <= before + YIELD_BYTES, "the others go on"
        assert this.transport.get_write_buffer_size() == len(ANSWER) + 4 - sent
        before = sent
        await asyncio.sleep(0)
    assert this.pipe.sent == b"head" + ANSWER
    assert this.transport.get_write_buffer_size() == 0


async def test_one_piece_is_held_for_a_slow_client() -> None:
    this = Session()
    this.pipe.room = 1_000
    this.transport.write(memoryview(ANSWER))
    this.transport.write(b"next")
    assert this.told.said == ["paused"]
    while this.told.said == ["paused"]:
        assert len(this.pipe.held) <= YIELD_BYTES
        this.pipe.room = 100_000
        this.pipe.move()
        if not this.pipe.held:
            this.transport.raw_resumed()
        await asyncio.sleep(0)
    assert this.pipe.sent == ANSWER + b"next"


async def test_what_was_written_is_sent_before_the_end() -> None:
    this = Session()
    this.transport.write(memoryview(ANSWER))
    this.transport.close()
    this.transport.write(b"ignored")
    assert this.transport.is_closing()
    while not this.pipe.is_closed:
        assert len(this.pipe.sent) < len(ANSWER)
        await asyncio.sleep(0)
    assert this.pipe.sent == ANSWER


async def test_nothing_is_sent_after_an_abort() -> None:
    this = Session()
    this.transport.write(memoryview(ANSWER))
    this.transport.abort()
    sent = len(this.pipe.sent)
    for _ in range(3):
        await asyncio.sleep(0)
    assert this.pipe.is_aborted
    assert len(this.pipe.sent) == sent < len(ANSWER)
    assert this.transport.get_write_buffer_size() == 0


@pytest.mark.parametrize("answer", [b"all", ANSWER], ids=["small", "large"])
async def test_eof_follows_what_was_written(answer: bytes) -> None:
    this = Session()
    this.transport.write(answer)
    this.transport.write_eof()
    while not this.pipe.has_ended:
        await asyncio.sleep(0)
    assert this.pipe.sent == answer
    assert not this.transport.is_closing()


async def test_a_client_may_have_left_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    this = Session()

    def write_eof() -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(this.pipe, "write_eof", write_eof)
    this.transport.write_eof()
    this.transport.close()
    assert this.pipe.is_closed
