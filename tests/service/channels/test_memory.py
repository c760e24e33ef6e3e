"""The memory of channels: its size cannot change, and the device knows it."""

import os
from collections.abc import Callable

import pytest

from expertd.service.channels.memory import SealedMemory
from expertd.service.memory import Mapped
from tests.service.channels.servers import mapped


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
