"""An end of a channel: memory that it shares with a process of its own machine, and a peer elsewhere."""

import mmap
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from expertd_client.channel.fence import fence
from expertd_client.channel.layout import WORD_BYTES
from expertd_client.nixl.agent import Agent, PeerError, Ranges
from expertd_client.nixl.messages import BYE, HELLO, Shape

AWAKE_SECONDS = 1.0  # after the last request or answer, in which it looks without sleeping
PAUSE_SECONDS = 0.005  # between two looks after that, and twice as long after a longer silence
_LONG_SECONDS = 30.0
_MANY_CORES = 4  # with fewer, it looks without sleeping for a moment, and then often
_SPIN_SECONDS, _LOOK_SECONDS = 200e-6, 100e-6
_CHECK_SECONDS = 0.01  # between two looks at the own side's connection, while awake
_HELLO_SECONDS = 1.0
_SILENCE_SECONDS = 10.0  # after which a peer has gone: it says hello every second
_FAREWELL_SECONDS = 0.2
_POLL_SECONDS = 0.001  # the least that poll() can wait
_BYTES = 65536


class Relay(ABC):
    """Runs until its own side ends the connection, or the peer ends or lies.

    rings  a descriptor that is readable after the own side has written something
    """

    def __init__(
        self,
        agent: Agent,
        connection: socket.socket,
        control: mmap.mmap,
        data: mmap.mmap,
        rings: int,
        num_slots: int,
        shape: Shape,
    ) -> None:
        self.agent, self.shape, self.num_slots = agent, shape, num_slots
        self.control, self.data = memoryview(control), memoryview(data)
        self.words = self.control.cast("Q")
        self._connection, self._rings = connection, rings
        self._watched = [connection.fileno(), rings]
        self._poll = select.poll()
        for descriptor in self._watched:
            self._poll.register(descriptor, select.POLLIN)
        self._lost = select.poll()
        self._lost.register(connection, select.POLLIN)
        self._is_open = True
        # On few cores it would keep those from computing for whom it waits.
        self._spin_seconds = AWAKE_SECONDS if len(os.sched_getaffinity(0)) >= _MANY_CORES else _SPIN_SECONDS

    @abstractmethod
    def look(self) -> bool:
        """Pass on what the own side has written; whether there was something."""

    @abstractmethod
    def take(self, message: bytes) -> None:
        """Pass on what the peer says. Raises PeerError."""

    @abstractmethod
    def pause(self) -> float:
        """Seconds that it may sleep."""

    def say_hello(self) -> None:
        """Tell the peer that this end is there. Raises PeerError."""
        self.agent.send(bytes((HELLO,)))

    def await_hello(self, seconds: float) -> None:
        """Wait for the first message of the peer, which is a hello. Raises PeerError."""
        end = time.monotonic() + seconds
        while not self.agent.receive():
            if time.monotonic() > end:
                raise PeerError(f"peer: expected a message over NIXL within {seconds:g} s, got none")
            os.sched_yield()

    def run(self) -> None:
        """Carry requests and answers until the end. Raises PeerError."""
        now = heard = said = busy = checked = time.monotonic()
        while self._is_open:
            for message in self.agent.receive():
                heard = now
                if self._take(message):
                    busy = now
            if self.look():
                busy = now
            self.agent.advance()
            now = time.monotonic()
            if now - said >= _HELLO_SECONDS:
                said = now
                self.say_hello()
                if now - heard > _SILENCE_SECONDS:
                    raise PeerError(f"peer: expected a sign of life, got none for {_SILENCE_SECONDS:g} s")
            if now - busy < self._spin_seconds or self.agent.is_writing:
                os.sched_yield()
                if now - checked >= _CHECK_SECONDS:
                    checked = now
                    self._is_open = self._is_open and not self._lost.poll(0)
                continue
            if now - busy < AWAKE_SECONDS:
                self._sleep(_LOOK_SECONDS)
            else:
                self._sleep(self.pause() if now - busy < _LONG_SECONDS else 2 * self.pause())
        self._part()

    def send_with(self, head: bytes, ranges: Ranges) -> None:
        """Send a message that ends with tensors. Raises PeerError."""
        self.agent.send(b"".join([head, *[self.data[offset : offset + size] for offset, size in ranges]]))

    def copy_in(self, ranges: Ranges, values: memoryview) -> None:
        """Write tensors that came in a message."""
        start = 0
        for offset, size in ranges:
            self.data[offset : offset + size] = values[start : start + size]
            start += size

    def set_word(self, offset: int, value: int) -> None:
        """Write 8 bytes at once, after everything that was written before."""
        fence()
        self.words[offset // WORD_BYTES] = value

    def _take(self, message: bytes) -> bool:
        """Whether it is about a request."""
        if not message:
            raise PeerError("message: expected a kind, got nothing")
        if message[0] == HELLO:
            return False
        if message[0] == BYE:
            self._is_open = False
        else:
            self.take(message)
        return True

    def _sleep(self, seconds: float) -> None:
        """Until the own side rings, or ends the connection, or time is over."""
        if seconds < _POLL_SECONDS:
            found = select.select(self._watched, (), (), seconds)[0]
        else:
            found = [number for number, _ in self._poll.poll(1e3 * seconds)]
        if self._rings in found:
            with suppress(BlockingIOError):
                os.read(self._rings, _BYTES)
        if self._connection.fileno() in found:
            self._is_open = False

    def _part(self) -> None:
        """Pass on what was written last, and have the peer know at once."""
        bye, end = bytes((BYE,)), time.monotonic() + _FAREWELL_SECONDS
        with suppress(PeerError):  # it may have gone first
            self.look()
            self.agent.send(bye)
            while time.monotonic() < end and bye not in self.agent.receive():
                self.agent.advance()
                time.sleep(0.001)
