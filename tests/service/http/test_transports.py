"""A large answer is sent in pieces, encrypted or not; no more than a piece is held for a slow client."""

import asyncio
import ssl
from contextlib import suppress

import pytest

from expertd.service.http.paced_transport import YIELD_BYTES, PacedTransport, PlainTransport
from expertd.service.http.tls import TlsTransport
from expertd.service.settings.parts import TlsSettings
from tests.service.certificates import TLS, client_context, load_tls

ANSWER = bytes(range(256)) * 40_000  # 10 MB


class Pipe:
    """A raw transport that sends `room` bytes, and holds the others."""

    def __init__(self) -> None:
        self.room = 1 << 40
        self.sent = b""
        self.held = b""
        self.is_aborted = self.is_closed = self.has_ended = False
        self.transport: PacedTransport

    def write(self, data: bytes) -> None:
        before = len(self.held)
        self.held += data
        self.move()
        if self.held and not before:
            self.transport.raw_paused()

    def move(self) -> None:
        moved, self.held = self.held[: self.room], self.held[self.room :]
        self.sent += moved
        self.room -= len(moved)

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def is_closing(self) -> bool:
        return self.is_aborted or self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write_eof(self) -> None:
        self.has_ended = True

    def abort(self) -> None:
        self.is_aborted = True


class Told:
    """The receiving side."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def writing_paused(self) -> None:
        self.said.append("paused")

    def writing_resumed(self) -> None:
        self.said.append("resumed")


class Plain:
    """A transport over a pipe, and a record of the calls to its owner."""

    def __init__(self) -> None:
        self.pipe, self.told = Pipe(), Told()
        self.transport: PacedTransport = self.made()
        self.pipe.transport = self.transport

    def made(self) -> PacedTransport:
        return PlainTransport(self.pipe, asyncio.get_running_loop(), self.told)  # type: ignore[arg-type]

    def received(self) -> bytes:
        """What the client can read by now."""
        sent, self.pipe.sent = self.pipe.sent, b""
        return sent


class Tls(Plain):
    """A server's side after its handshake, and the client's."""

    def made(self) -> PacedTransport:
        to_server, self.outgoing, self.to_client = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
        server = load_tls(TlsSettings.model_validate(TLS)).wrap_bio(
            to_server, self.outgoing, server_side=True
        )
        self.client = client_context().wrap_bio(self.to_client, to_server, server_hostname="localhost")
        for side in (self.client, server, self.client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
            self.to_client.write(self.outgoing.read())
        loop = asyncio.get_running_loop()
        return TlsTransport(self.pipe, server, self.outgoing, loop, self.told)  # type: ignore[arg-type]

    def received(self) -> bytes:
        self.to_client.write(super().received())
        data = b""
        with suppress(ssl.SSLWantReadError):
            while piece := self.client.read(1 << 16):  # empty: the connection has ended
                data += piece
        return data


@pytest.mark.parametrize("kind", [Plain, Tls])
async def test_one_piece_is_held_for_a_slow_client(kind: type[Plain]) -> None:
    this = kind()
    this.pipe.room = 1_000
    this.transport.write(b"head")
    this.transport.write(memoryview(ANSWER))
    this.transport.write(b"next")
    assert this.told.said == ["paused"]
    data = this.received()
    while this.told.said == ["paused"]:
        assert len(this.pipe.held) <= 1.1 * YIELD_BYTES
        assert len(data) + 1.1 * YIELD_BYTES + this.transport.get_write_buffer_size() >= len(ANSWER)
        this.pipe.room = 100_000
        this.pipe.move()
        if not this.pipe.held:
            this.transport.raw_resumed()
        await asyncio.sleep(0)
        data += this.received()
    assert data == b"head" + ANSWER + b"next"
    assert this.told.said == ["paused", "resumed"]
    assert this.transport.get_write_buffer_size() == 0


@pytest.mark.parametrize("kind", [Plain, Tls])
async def test_what_was_written_is_sent_before_the_end(kind: type[Plain]) -> None:
    this = kind()
    this.transport.write(memoryview(ANSWER))
    this.transport.close()
    this.transport.write(b"ignored")
    assert this.transport.is_closing()
    data = this.received()
    assert len(data) < len(ANSWER)
    while not this.pipe.is_closed:
        await asyncio.sleep(0)
        data += this.received()
    assert data == ANSWER


async def test_nothing_is_sent_after_an_abort() -> None:
    this = Plain()
    this.transport.write(memoryview(ANSWER))
    this.transport.abort()
    sent = len(this.pipe.sent)
    for _ in range(3):
        await asyncio.sleep(0)
    assert this.pipe.is_aborted
    assert len(this.pipe.sent) == sent < len(ANSWER)
    assert this.transport.get_write_buffer_size() == 0


async def test_a_client_may_have_left_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    this = Plain()

    def write_eof() -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(this.pipe, "write_eof", write_eof)
    this.transport.write_eof()
    this.transport.close()
    assert this.pipe.is_closed


async def test_nothing_is_held_for_a_client_that_makes_tls_talk_and_does_not_read() -> None:
    this = Tls()
    this.pipe.room = 0
    for _ in range(100):
        assert not this.pipe.is_aborted
        this.outgoing.write(bytes(10_000))  # as the replies to requests for new keys are
        this.transport.flush()  # type: ignore[attr-defined]
    this.outgoing.write(bytes(100_000))
    this.transport.flush()  # type: ignore[attr-defined]
    assert this.pipe.is_aborted
