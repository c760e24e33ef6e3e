"""The memory of channels: sealed, registered, and freed, also that of one that cannot be opened."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertd.service.channels import opening
from expertd.service.channels.memory import SealedMemory
from expertd.service.channels.opening import Opening
from expertd.service.memory import Mapped
from tests.service.apps import error_of
from tests.service.channels.peer import ChannelClosedError, Peer
from tests.service.channels.servers import channel_server, mapped, opened
from tests.service.channels.test_opening import BODY
from tests.service.runners import EchoRunner
from tests.service.waiting import until


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Descriptors of earlier tests would be closed while these count them."""
    gc.collect()


def descriptors(mappings: bool = True) -> int:
    """Open ones; a mapping has one of its own, and lives as long as an error whose frames refer to it."""
    names = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(mappings or not name.startswith("/memfd:") for name in names)


def refuse(*_: object) -> Any:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("call", ["eventfd", "pipe2"])
async def test_without_descriptors_nothing_stays_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    closed = list[SealedMemory]()
    close = SealedMemory.close

    def counted(self: SealedMemory) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(SealedMemory, "close", counted)
    async with channel_server(tmp_path, EchoRunner(), channels={"max_channels": 2}) as server:
        await opened(server)
        before, num_bytes = descriptors(mappings=False), server.metric("channel_bytes")
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            for _ in range(3):
                response = await server.http.post("/v1/channels", json=BODY)
                text = "channels: the server has no room for another one: Too many open files"
                assert error_of(response, 503) == text
                assert response.headers["retry-after"] == "1"
        assert server.metric("channel_bytes") == num_bytes
        assert descriptors(mappings=False) == before
        assert len(closed) == 2 * 3
        await opened(server)


async def test_a_channel_whose_descriptors_cannot_be_copied_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with channel_server(tmp_path, EchoRunner()) as server:
        await server.http.get("/v2")  # opens its connection
        before = descriptors()
        answer = await opened(server)
        with monkeypatch.context() as patch:
            patch.setattr("expertd.service.channels.open_channel.os.dup", refuse)
            with pytest.raises((ChannelClosedError, ConnectionError)):
                await asyncio.to_thread(Peer, answer)
            await until(lambda: server.metric("channel_bytes") == 0)
        await until(lambda: descriptors() <= before)


@pytest.mark.parametrize("number", [1, 2])
async def test_memory_that_nobody_waits_for_any_more_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of the region, or of the control memory: the caller leaves while it is made."""
    making, goes_on = threading.Event(), threading.Event()
    made, closed = list[int](), list[int]()

    class Slow(SealedMemory):
        def __init__(self, *arguments: Any) -> None:
            if len(made) == number - 1:
                making.set()
                assert goes_on.wait(60)
            super().__init__(*arguments)
            made.append(id(self))

        def close(self) -> None:
            closed.append(id(self))
            super().close()

    async with channel_server(tmp_path, EchoRunner()) as server:
        before = descriptors()
        monkeypatch.setattr(opening, "SealedMemory", Slow)
        hub = server.app.channels
        asked = asyncio.ensure_future(hub.open(Opening(("tiny",), 2, 4)))
        assert await asyncio.to_thread(making.wait, 60)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert hub.used_bytes == 0
        goes_on.set()
        await until(lambda: len(closed) == number)
        assert set(closed) == set(made)
        gc.collect()
        await until(lambda: descriptors() <= before)


def test_neither_side_can_change_the_size() -> None:
    memory = SealedMemory("expertd-channel", 8192)
    descriptor = memory.take_descriptor()
    for size in (0, 4096, 8193):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.pwrite(descriptor, b"x", 8191)
    assert memory.view[8191] == ord("x")
    memory.close()
    os.close(descriptor)


def test_memory_is_registered_and_goes_with_its_last_user() -> None:
    events: list[object] = []

    def register(memory: Mapped) -> Callable[[], None]:
        assert os.fstat(memory.descriptor).st_size == memory.num_bytes
        events.append((memory.address, memory.num_bytes))
        return lambda: events.append("unregistered")

    before = mapped()
    memory = SealedMemory("expertd-channel", 4096, register)
    assert events == [(memory.span.address, 4096)]
    part = memory.span.part(64, 64)
    memory.close()
    del memory
    assert events[1:] == ["unregistered"]
    assert mapped() == before + 1, "a part of it is in use"
    del part
    assert mapped() == before


def test_memory_that_cannot_be_registered_is_not_kept() -> None:
    def register(memory: Mapped) -> Callable[[], None]:
        raise RuntimeError("too much")

    before = mapped()
    with pytest.raises(RuntimeError, match="too much"):
        SealedMemory("expertd-channel", 4096, register)
    assert mapped() == before
