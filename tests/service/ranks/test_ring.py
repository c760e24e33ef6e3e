"""Rings between processes: order, full, empty, wake-ups, and a reader that sleeps."""

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertd.service.ranks.ring import Bell, Ring, RingFullError, ring_bytes

_SLOTS, _BYTES = 4, 1000
_PROGRAM = Path(__file__).with_name("ring_program.py")


def _sides() -> tuple[Ring, Ring]:
    """The writer's and the reader's side of a new ring."""
    memory = memoryview(bytearray(ring_bytes(_SLOTS, _BYTES)))
    return Ring(memory, _SLOTS, _BYTES), Ring(memory, _SLOTS, _BYTES)


def test_messages_come_in_order_and_whole() -> None:
    writer, reader = _sides()
    assert reader.take() is None
    sent = [bytes([number]) * (number * 61 % (_BYTES + 1)) for number in range(100)]
    got = []
    for message in sent:
        writer.put(message)
        assert not reader.is_empty()
        got.append(reader.take())
        assert reader.is_empty()
    assert got == sent


def test_a_full_ring_refuses_and_keeps_what_it_has() -> None:
    writer, reader = _sides()
    for number in range(_SLOTS):
        writer.put(bytes([number]))
    with pytest.raises(RingFullError, match="expected room for a message, got 4 that nobody took"):
        writer.put(b"x")
    assert reader.take() == b"\0"
    writer.put(b"\4")
    assert [reader.take() for _ in range(_SLOTS)] == [b"\1", b"\2", b"\3", b"\4"]
    assert reader.take() is None


def test_wrong_sizes_are_refused() -> None:
    writer, reader = _sides()
    with pytest.raises(ValueError, match="message: expected at most 1000 bytes, got 1001"):
        writer.put(bytes(_BYTES + 1))
    assert reader.take() is None
    writer.put(bytes(_BYTES))
    assert reader.take() == bytes(_BYTES)
    with pytest.raises(ValueError, match=r"memory: expected .* bytes, got 64"):
        Ring(memoryview(bytearray(64)), _SLOTS, _BYTES)


def test_a_bell_ends_a_wait_that_began_before_or_after_it() -> None:
    bell, rung = Bell(), threading.Event()
    rung.set()
    bell.ring()
    assert bell.wait(rung.is_set, 0.0, 10.0)
    rung.clear()
    assert not bell.wait(rung.is_set, 0.0, 0.01), "a past ring is no condition"

    def ring() -> None:
        rung.set()
        bell.ring()

    timer = threading.Timer(0.05, ring)
    timer.start()
    assert bell.wait(rung.is_set, 0.0, 3600.0)
    timer.join()


@dataclass
class Peer:
    """A process that answers each number with the next one."""

    there: Ring
    back: Ring
    their_bell: Bell
    our_bell: Bell

    def send(self, number: int, rest: bytes = b"") -> None:
        self.there.put(number.to_bytes(8, "little") + rest)
        self.their_bell.ring()

    def receive(self) -> tuple[int, bytes]:
        assert self.our_bell.wait(lambda: not self.back.is_empty(), 50e-6, 20.0), "no answer"
        message = self.back.take()
        assert message is not None
        return int.from_bytes(message[:8], "little"), message[8:]


@contextmanager
def _peer() -> Iterator[Peer]:
    middle = ring_bytes(_SLOTS, _BYTES)
    memory = os.memfd_create("expertd-test")
    os.ftruncate(memory, 2 * middle)
    view = memoryview(mmap.mmap(memory, 2 * middle))
    there, back = (Ring(part, _SLOTS, _BYTES) for part in (view[:middle], view[middle:]))
    our_bell, their_bell = Bell(), Bell()
    descriptors = (memory, our_bell.descriptor, their_bell.descriptor)
    arguments = [sys.executable, str(_PROGRAM), *map(str, (_SLOTS, _BYTES, *descriptors))]
    process = subprocess.Popen(arguments, pass_fds=descriptors)
    os.close(memory)
    try:
        yield Peer(there, back, their_bell, our_bell)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_two_processes_exchange_every_message_in_order() -> None:
    with _peer() as peer:
        sent = 0
        for answered in range(1, 3001):
            while sent < 3000 and sent - answered + 1 < 2:  # two in flight, as steps
                sent += 1
                peer.send(sent, bytes([sent % 251]) * (sent % 900))
            assert peer.receive() == (answered + 1, bytes([answered % 251]) * (answered % 900))
        peer.send(0)


def test_a_reader_that_waits_uses_less_than_a_hundredth_of_a_core() -> None:
    with _peer() as peer:
        peer.send(1)
        peer.receive()
        time.sleep(1.0)  # the time that is measured
        peer.send(2)
        peer.receive()
        peer.send(0)
        used_ns, _ = peer.receive()
        assert used_ns < 0.01 * 1e9
