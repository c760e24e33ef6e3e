"""The caller's end: it has the memory of a channel for a caller on its machine, as a server would."""

import mmap
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from expertd_client.channel.layout import (
    ANSWER_OFFSET,
    CANCEL_OFFSET,
    CANCELS_OFFSET,
    ERROR_OFFSET,
    EXPIRED_OFFSET,
    GREETING,
    HEADER_BYTES,
    REQUEST,
    SLOT_BYTES,
    TIMES_OFFSET,
    WORD_BYTES,
)
from expertd_client.nixl.agent import Agent, PeerError
from expertd_client.nixl.lines import receive_line, send_line
from expertd_client.nixl.messages import (
    ANSWER_KIND,
    ANSWERED,
    CANCEL,
    EXPIRED,
    INLINE_BYTES,
    REQUEST_KIND,
    STATUS,
    TIMED,
    TIMES,
    WORD,
    Places,
    Shape,
    places_of,
)
from expertd_client.nixl.relay import PAUSE_SECONDS, Relay

_IDLE_SECONDS = 0.1  # between two looks for signs of life
_MEETING_SECONDS = 5.0


class CallerEnd(Relay):
    """Requests go to the peer, in their order; answers come in any order."""

    def __init__(
        self, agent: Agent, connection: socket.socket, data: mmap.mmap, num_slots: int, shape: Shape
    ) -> None:
        descriptor = os.memfd_create("expertd-channel", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, HEADER_BYTES + num_slots * SLOT_BYTES)
        control = mmap.mmap(descriptor, 0)
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        super().__init__(agent, connection, control, data, bell, num_slots, shape)
        self._control_file, self._bell = descriptor, bell
        self._answers_read, self._answers = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._sent = self._cancels = 0
        self._in_flight: dict[int, Places] = {}  # by sequence
        self._answered: dict[int, int] = {}  # slot -> sequence, whose times may come
        self._takes: dict[int, Callable[[bytes], None]] = {
            ANSWER_KIND: self._answer,
            EXPIRED: self._expired,
            TIMES: self._times,
        }

    def hand_over(self, data: int) -> None:
        """Give the caller its descriptors: those of a channel that it has claimed. Raises OSError."""
        descriptors = [self._control_file, data, self._bell, self._answers_read]
        socket.send_fds(self._connection, [GREETING], descriptors)
        for descriptor in (self._control_file, data, self._answers_read):
            os.close(descriptor)

    def pause(self) -> float:
        return PAUSE_SECONDS if self._in_flight else _IDLE_SECONDS

    def look(self) -> bool:
        words, found = self.words, False
        while True:
            start = HEADER_BYTES + self._sent % self.num_slots * SLOT_BYTES
            if words[start // WORD_BYTES] != self._sent + 1:
                break
            found = True
            self._sent += 1
            line = bytes(self.control[start + WORD_BYTES : start + WORD_BYTES + REQUEST.size])
            places = self._in_flight[self._sent] = places_of(line, self.shape)
            message = WORD.pack(REQUEST_KIND, self._sent) + line
            if places.input_bytes <= INLINE_BYTES:
                self.send_with(message, places.inputs)
            else:
                self.agent.write(places.inputs, message)
        if (cancels := words[CANCELS_OFFSET // WORD_BYTES]) != self._cancels:
            self._cancels = cancels
            for sequence in self._in_flight:
                if words[(self._slot(sequence) + CANCEL_OFFSET) // WORD_BYTES] == sequence:
                    self.agent.send(WORD.pack(CANCEL, sequence))
        return found

    def take(self, message: bytes) -> None:
        try:
            self._takes[message[0]](message)
        except (KeyError, struct.error) as error:
            raise PeerError(f"message: expected one of the server's, got {message[:16]!r}") from error

    def _answer(self, message: bytes) -> None:
        _, sequence, line, timed = ANSWERED.unpack_from(message)
        places, rest = self._in_flight.pop(sequence), memoryview(message)[ANSWERED.size :]
        slot = self._slot(sequence)
        status, length = STATUS.unpack_from(line)
        if status == 200:
            if len(rest):
                if len(rest) != places.output_bytes:
                    raise PeerError(f"output: expected {places.output_bytes} bytes, got {len(rest)}")
                self.copy_in(places.output, rest)
        elif len(rest) != length or length > SLOT_BYTES - ERROR_OFFSET:
            raise PeerError(f"error: expected {length} bytes of text, got {len(rest)}")
        else:
            self.control[slot + ERROR_OFFSET : slot + ERROR_OFFSET + length] = rest
        answer = slot + ANSWER_OFFSET
        self.control[answer + WORD_BYTES : answer + WORD_BYTES + len(line)] = line
        if timed == sequence:
            self.set_word(answer + TIMES_OFFSET + 2 * WORD_BYTES, sequence)
        self._answered[slot] = sequence
        self.set_word(answer, sequence)
        self._ring()

    def _expired(self, message: bytes) -> None:
        _, sequence = WORD.unpack(message)
        self._in_flight[sequence]  # else there is no such request
        self.set_word(self._slot(sequence) + ANSWER_OFFSET + EXPIRED_OFFSET, sequence)
        self._ring()

    def _times(self, message: bytes) -> None:
        _, sequence, queue, compute = TIMED.unpack(message)
        slot = self._slot(sequence)
        if self._answered.get(slot) == sequence:  # else a later request's answer is there
            times = slot + ANSWER_OFFSET + TIMES_OFFSET
            self.set_word(times, queue)
            self.set_word(times + WORD_BYTES, compute)
            self.set_word(times + 2 * WORD_BYTES, sequence)

    def _slot(self, sequence: int) -> int:
        return HEADER_BYTES + (sequence - 1) % self.num_slots * SLOT_BYTES

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # full: it is readable anyway
            os.write(self._answers, b"\1")


def serve(connection: socket.socket) -> None:
    """Be the end for the caller at the other side of `connection`, until either ends."""
    asked = receive_line(connection)
    descriptor = os.memfd_create("expertd-channel-data", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, int(asked["data_bytes"]))
    data = mmap.mmap(descriptor, 0)
    agent = Agent(data)
    send_line(connection, agent.described())
    opened: Any = receive_line(connection)
    geometry = opened["geometry"]
    shape = Shape(*(int(geometry[name]) for name in ("max_tokens", "hidden_size", "top_k", "data_bytes")))
    agent.connect(opened["nixl"])
    end = CallerEnd(agent, connection, data, int(geometry["num_slots"]), shape)
    end.say_hello()
    end.await_hello(_MEETING_SECONDS)  # else one cannot reach the other
    send_line(connection, {})
    receive_line(connection)
    end.hand_over(descriptor)
    end.run()
