"""What is written with TLS is encrypted as fast as it is sent, and bytes are held for no client."""

import asyncio
import ssl
from contextlib import suppress

from expertd.service.http.tls import TlsTransport
from expertd.service.settings.certificates import load_tls
from expertd.service.settings.parts import TlsSettings
from tests.service.certificates import TLS, client_context
from tests.service.http.pipe import Pipe, Told


class Session:
    """A server's side after its handshake, and the client's."""

    def __init__(self) -> None:
        to_server, self.outgoing, self.to_client = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
        context = load_tls(TlsSettings.model_validate(TLS))
        server = context.wrap_bio(to_server, self.outgoing, server_side=True)
        self.client = client_context().wrap_bio(self.to_client, to_server, server_hostname="localhost")
        for side in (self.client, server, self.client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
            self.to_client.write(self.outgoing.read())
        self.pipe, self.told = Pipe(), Told()
        loop = asyncio.get_running_loop()
        self.transport = TlsTransport(self.pipe, server, self.outgoing, loop, self.told)  # type: ignore[arg-type]
        self.pipe.transport = self.transport

    def received(self) -> bytes:
        """What the client can read by now."""
        self.to_client.write(self.pipe.sent)
        self.pipe.sent = b""
        data = b""
        while True:
            try:
                data += self.client.read(1 << 16)
            except ssl.SSLWantReadError:
                return data


async def test_an_answer_is_encrypted_as_fast_as_it_is_sent() -> None:
    this, answer = Session(), bytes(range(256)) * 40_000  # 10 MB
    this.pipe.room = 300_000
    this.transport.write(b"head")
    this.transport.write(memoryview(answer))
    assert this.told.said == ["paused"]
    assert len(this.pipe.held) < 100_000, "one piece"
    assert 0 < len(answer) - this.transport.get_write_buffer_size() < 500_000
    data = this.received()
    while this.told.said == ["paused"]:
        this.pipe.room = 1_000_000
        this.pipe.move()
        this.transport.raw_resumed()
        await asyncio.sleep(0)
        data += this.received()
    assert data == b"head" + answer
    assert this.told.said == ["paused", "resumed"]
    assert this.transport.get_write_buffer_size() == 0


async def test_a_fast_client_does_not_keep_others_waiting() -> None:
    this = Session()
    this.transport.write(bytes(10_000_000))
    assert len(this.pipe.sent) < 2_000_000, "the others go on"
    data = b""
    while len(data) < 10_000_000:
        await asyncio.sleep(0)
        data += this.received()
    assert this.told.said == ["paused", "resumed"]


async def test_nothing_is_held_for_a_client_that_makes_tls_talk_and_does_not_read() -> None:
    this = Session()
    this.pipe.room = 0
    for _ in range(100):
        assert not this.pipe.is_aborted
        this.outgoing.write(bytes(10_000))  # as the replies to requests for new keys are
        this.transport.flush()
    this.outgoing.write(bytes(100_000))
    this.transport.flush()
    assert this.pipe.is_aborted
