"""Channels over NIXL: what callers' ends say, which may lie, and the server's setting."""

import asyncio
import logging
import mmap
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd.service.commands.serve import check_nixl
from expertd_client.channel.layout import REQUEST
from expertd_client.nixl.agent import Agent
from expertd_client.nixl.messages import (
    ANSWER_KIND,
    ANSWERED,
    BYE,
    CANCEL,
    EXPIRED,
    HELLO,
    REQUEST_KIND,
    WORD,
)
from tests.service.apps import HIDDEN, Serving, tiny_settings
from tests.service.channels.servers import channel_server
from tests.service.runners import EchoRunner
from tests.service.waiting import until
from tests.short import few_of

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="needs the package nixl-cu13")
slow = pytest.mark.slow  # a process for each channel
NIXL = {"nixl": True}
SIZE, OUTPUT, MAX_TOKENS = 1 << 20, 512 << 10, 64
ROWS = np.random.default_rng(58).standard_normal((MAX_TOKENS, HIDDEN), np.float32)


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As between machines without RDMA."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    caplog.set_level(logging.INFO, "expertd")


class End:
    """A caller's end that says what a test wants."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE)
        self.agent = Agent(self.memory)

    async def opened(self, server: Serving, **changes: Any) -> Any:
        """What the server answers to the opening of a channel to this end."""
        body = {"version": 3, "model": "tiny", "num_slots": 2, "max_tokens": MAX_TOKENS}
        memory = {"nixl": self.agent.described() | changes}
        return await server.http.post("/v1/channels", json=body | {"memory": memory}, timeout=60)

    async def connect(self, server: Serving, **changes: Any) -> str:
        """Open a channel, and connect to its other end; the channel's id."""
        response = await self.opened(server, **changes)
        assert response.status_code == 201, response.text
        self.agent.connect(response.json()["nixl"])
        self.agent.send(bytes((HELLO,)))
        await self.message(HELLO)
        number: str = response.json()["id"]
        return number

    async def message(self, kind: int) -> bytes:
        """The next message of a kind; all others are dropped."""
        async with asyncio.timeout(60):
            while True:
                for message in self.agent.receive():
                    if message[0] == kind:
                        return message
                self.agent.advance()
                await asyncio.sleep(0.001)

    async def answer(self, sequence: int) -> tuple[int, bytes]:
        """The status of an answer, and the text or the output in it."""
        message = await self.message(ANSWER_KIND)
        _, answered, line, _ = ANSWERED.unpack_from(message)
        assert answered == sequence
        return struct.unpack_from("<I", line)[0], message[ANSWERED.size :]


def request(
    sequence: int, num_tokens: int = 1, rows: bytes | None = None, timeout_us: int = 0, output: int = OUTPUT
) -> bytes:
    """A request of the first of ROWS."""
    line = REQUEST.pack(num_tokens, 3, 3, 0, timeout_us, 0, 0, 0, output, 0, 0)
    return WORD.pack(REQUEST_KIND, sequence) + line + (ROWS[:num_tokens].tobytes() if rows is None else rows)


async def check_works(server: Serving, end: End, sequence: int) -> None:
    """A request over a channel has the right answer."""
    end.agent.send(request(sequence, 3))
    assert await end.answer(sequence) == (200, ROWS[:3].tobytes())


LIES = {
    "kind": (b"\x63", "message: expected one of a caller's"),
    "short line": (request(1)[:20], "message: expected one of a caller's"),
    "long cancel": (WORD.pack(CANCEL, 1) + b"x", "message: expected one of a caller's"),
    "few tensors": (request(1, rows=b"x"), "tensors: expected 512 bytes, got 1"),
    "many tokens": (request(1, MAX_TOKENS + 1), "tensors: expected 0 bytes"),
    "sequence": (request(3), "sequence of slot 0: expected 1, got 3"),
}


@needs_nixl
@slow
@pytest.mark.parametrize("lie", few_of(LIES, ["kind", "many tokens", "sequence"]))
async def test_an_end_that_lies_ends_its_own_channel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    message, text = LIES[lie]
    async with channel_server(tmp_path, EchoRunner(), channels=NIXL) as server:
        honest, liar = End(), End()
        # At once: this end gives no signs of life while it waits for another one's process to start.
        number, lies = await asyncio.gather(honest.connect(server), liar.connect(server))
        await check_works(server, honest, 1)
        liar.agent.send(message)
        await until(lambda: lies not in server.app.channels.entries)
        assert text in caplog.text
        await check_works(server, honest, 2)
        assert number in server.app.channels.entries


@needs_nixl
@slow
async def test_a_slot_that_is_used_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner, channels=NIXL) as server:
        end = End()
        number = await end.connect(server)
        runner.gate.clear()
        for sequence in (1, 2, 3):
            end.agent.send(request(sequence))
        await until(lambda: number not in server.app.channels.entries)
        runner.gate.set()
    assert "sequence: expected one whose slot is free, got 3" in caplog.text


@needs_nixl
@slow
async def test_what_a_line_says_is_refused_by_the_server(tmp_path: Path) -> None:
    """The channel goes on."""
    async with channel_server(tmp_path, EchoRunner(), channels=NIXL) as server:
        end = End()
        await end.connect(server)
        end.agent.send(request(1, MAX_TOKENS + 1, rows=b""))
        status, text = await end.answer(1)
        assert (status, text) == (400, f"num_tokens: expected at most {MAX_TOKENS}, got 65".encode())
        end.agent.send(request(2, output=SIZE, rows=b""))
        status, text = await end.answer(2)
        assert status == 400
        assert text.startswith(b"output: expected 512 bytes inside the region")
        await check_works(server, end, 3)


@needs_nixl
@slow
async def test_large_tensors_are_written_to_their_places(tmp_path: Path) -> None:
    async with channel_server(tmp_path, EchoRunner(), channels=NIXL) as server:
        end = End()
        await end.connect(server)
        for sequence in (1, 2, 3):
            rows = ROWS * sequence
            end.memory[: rows.nbytes] = rows.tobytes()
            end.agent.write(((0, rows.nbytes),), request(sequence, MAX_TOKENS, rows=b""))
            assert await end.answer(sequence) == (200, b"")
            assert end.memory[OUTPUT : OUTPUT + rows.nbytes] == rows.tobytes()


@needs_nixl
@slow
async def test_cancelling_timeouts_and_the_end_of_a_channel(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner, {"max_batch_tokens": 64}, channels=NIXL) as server:
        end = End()
        number = await end.connect(server)
        runner.gate.clear()
        end.agent.send(request(1, timeout_us=300_000))
        await runner.begun()
        end.agent.send(request(2))
        end.agent.send(WORD.pack(CANCEL, 2))
        assert (await end.answer(2))[0] == 499
        assert await end.message(EXPIRED) == WORD.pack(EXPIRED, 1)
        runner.gate.set()
        assert (await end.answer(1))[0] == 200
        response = await server.http.delete(f"/v1/channels/{number}")
        assert (response.json()["memory"], response.json()["requests"]) == ("nixl", 2)
        await end.message(BYE)
        assert server.metric("channels") == 0
        await until(lambda: server.metric("channel_bytes") == 0)


@needs_nixl
@slow
async def test_a_caller_that_says_goodbye(tmp_path: Path) -> None:
    async with channel_server(tmp_path, EchoRunner(), channels=NIXL) as server:
        end = End()
        number = await end.connect(server)
        assert server.metric("channel_bytes") == SIZE
        end.agent.send(bytes((BYE,)))
        await until(lambda: number not in server.app.channels.entries)


@needs_nixl
@slow
@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ({"metadata": "bm8gYWdlbnQ="}, "metadata: expected an agent's that can be reached"),
        ({"metadata": "no base64"}, "nixl: expected an agent"),
        ({"address": 1 << 63}, "nixl: expected an agent"),
        ({"byte_size": 0}, "byte_size: expected"),
    ],
)
async def test_an_end_that_cannot_be_is_refused(tmp_path: Path, lie: dict[str, Any], text: str) -> None:
    async with channel_server(tmp_path, EchoRunner(), channels=NIXL) as server:
        response = await End().opened(server, **lie)
        assert response.status_code == 400
        assert text in response.json()["error"]
        assert not server.app.channels.entries
        await until(lambda: server.metric("channel_bytes") == 0)


@needs_nixl
@slow
async def test_an_end_that_lies_about_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its outputs have no place: its own channel ends."""
    async with channel_server(tmp_path, EchoRunner(), channels=NIXL) as server:
        honest, liar = End(), End()
        _, number = await asyncio.gather(honest.connect(server), liar.connect(server, address=4096))
        liar.agent.send(request(1, MAX_TOKENS))
        await until(lambda: number not in server.app.channels.entries)
        assert "nixl: expected a peer, got NIXL_ERR_NOT_FOUND" in caplog.text
        await check_works(server, honest, 1)


@needs_nixl
@slow
@pytest.mark.thorough  # waits for 10 seconds
async def test_an_end_that_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with channel_server(tmp_path, EchoRunner(), channels=NIXL) as server:
        assert (await End().opened(server)).status_code == 201
        await until(lambda: not server.app.channels.entries)
    assert "peer: expected a message over NIXL within 10 s, got none" in caplog.text


async def test_channels_over_nixl_need_the_setting(tmp_path: Path) -> None:
    nixl = {"byte_size": 1, "address": 0, "metadata": ""}
    body = {"version": 3, "model": "tiny", "num_slots": 2, "max_tokens": 1, "memory": {"nixl": nixl}}
    async with channel_server(tmp_path) as server:
        response = await server.http.post("/v1/channels", json=body)
        assert response.status_code == 403
        assert response.json()["error"] == "channels: expected the setting channels.nixl, got false"
    async with channel_server(tmp_path, channels={"socket": None, "nixl": True}) as server:
        response = await server.http.post("/v1/channels", json=body | {"memory": "system"})
        assert response.json()["error"] == "channels: expected the setting channels.socket, got null"
        assert (await server.http.get("/v1/channels")).json() == {"channels": []}


def test_the_setting_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    check_nixl(tiny_settings())
    with pytest.raises(ValueError, match=r"^channels\.nixl: expected .*expertd\[nixl\].*, got no nixl-cu13$"):
        check_nixl(tiny_settings(channels=NIXL))
