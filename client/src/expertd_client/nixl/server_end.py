"""The server's end: the owner of a channel of the server, whose requests come from another machine."""

import mmap
import os
import socket
from contextlib import suppress

from expertd_client.channel.claiming import DESCRIPTORS, receive
from expertd_client.channel.layout import (
    ANSWER_OFFSET,
    CANCEL_OFFSET,
    CANCELS_OFFSET,
    ERROR_OFFSET,
    EXPIRED_OFFSET,
    HEADER_BYTES,
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
    REQUEST_BYTES,
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

_MEETING_SECONDS = 10.0
_LINE_BYTES = 32  # of an answer, from its status to compute_ns


class ServerEnd(Relay):
    """Requests come from the peer; answers go to it, small outputs with them."""

    def __init__(
        self,
        agent: Agent,
        connection: socket.socket,
        descriptors: "list[int]",
        maps: "tuple[mmap.mmap, mmap.mmap]",
        num_slots: int,
        shape: Shape,
    ) -> None:
        *_, self._bell, answers = descriptors
        super().__init__(agent, connection, *maps, answers, num_slots, shape)
        self._cancels = 0
        self._in_flight: dict[int, tuple[int, Places]] = {}  # slot -> request
        self._expired: set[int] = set()  # requests of which the caller knows
        self._untimed: dict[int, int] = {}  # slot -> a request that was answered without times

    def pause(self) -> float:
        return PAUSE_SECONDS

    def take(self, message: bytes) -> None:
        if message[0] == REQUEST_KIND and len(message) >= REQUEST_BYTES:
            self._request(message)
        elif message[0] == CANCEL and len(message) == WORD.size:
            self._cancel(WORD.unpack(message)[1])
        else:
            raise PeerError(f"message: expected one of a caller's, got {message[:16]!r}")

    def look(self) -> bool:
        words, found = self.words, False
        for slot, (sequence, places) in list(self._in_flight.items()):
            answer = (slot + ANSWER_OFFSET) // WORD_BYTES
            if words[answer] == sequence:
                found = True
                del self._in_flight[slot]
                self._answer(slot, sequence, places)
            elif words[answer + EXPIRED_OFFSET // WORD_BYTES] == sequence and sequence not in self._expired:
                self._expired.add(sequence)
                self.agent.send(WORD.pack(EXPIRED, sequence))
        for slot, sequence in list(self._untimed.items()):
            times = (slot + ANSWER_OFFSET + TIMES_OFFSET) // WORD_BYTES
            if words[times + 2] >= sequence:
                del self._untimed[slot]
                if words[times + 2] == sequence:
                    self.agent.send(TIMED.pack(TIMES, sequence, words[times], words[times + 1]))
        return found

    def _request(self, message: bytes) -> None:
        _, sequence = WORD.unpack_from(message)
        slot = HEADER_BYTES + (sequence - 1) % self.num_slots * SLOT_BYTES
        if slot in self._in_flight:
            raise PeerError(f"sequence: expected one whose slot is free, got {sequence}")
        line, values = message[WORD.size : REQUEST_BYTES], memoryview(message)[REQUEST_BYTES:]
        places = places_of(line, self.shape)
        if len(values):
            if len(values) != places.input_bytes:
                raise PeerError(f"tensors: expected {places.input_bytes} bytes, got {len(values)}")
            self.copy_in(places.inputs, values)
        self._in_flight[slot] = sequence, places
        self._untimed.pop(slot, None)
        self.control[slot + WORD_BYTES : slot + WORD_BYTES + len(line)] = line
        self.set_word(slot, sequence)
        self._ring()

    def _cancel(self, sequence: int) -> None:
        slot = HEADER_BYTES + (sequence - 1) % self.num_slots * SLOT_BYTES
        self.set_word(slot + CANCEL_OFFSET, sequence)
        self._cancels += 1
        self.set_word(CANCELS_OFFSET, self._cancels)
        self._ring()

    def _answer(self, slot: int, sequence: int, places: Places) -> None:
        self._expired.discard(sequence)
        start = slot + ANSWER_OFFSET
        line = bytes(self.control[start + WORD_BYTES : start + WORD_BYTES + _LINE_BYTES])
        timed = self.words[(start + TIMES_OFFSET) // WORD_BYTES + 2]
        if timed != sequence:
            self._untimed[slot] = sequence
        message = ANSWERED.pack(ANSWER_KIND, sequence, line, timed)
        status, length = STATUS.unpack_from(line)
        if status != 200:
            self.agent.send(message + bytes(self.control[slot + ERROR_OFFSET : slot + ERROR_OFFSET + length]))
        elif places.output_bytes <= INLINE_BYTES:
            self.send_with(message, places.output)
        else:
            self.agent.write(places.output, message)

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)


def serve(connection: socket.socket) -> None:
    """Be the end of the channel that the server hands over through `connection`, until either ends."""
    descriptors = receive(connection, "server", (DESCRIPTORS,))
    opened = receive_line(connection)
    geometry = opened["geometry"]
    shape = Shape(*(int(geometry[name]) for name in ("max_tokens", "hidden_size", "top_k", "data_bytes")))
    maps = (
        mmap.mmap(descriptors[0], int(geometry["control_bytes"])),
        mmap.mmap(descriptors[1], shape.data_bytes),
    )
    for descriptor in descriptors[:2]:
        os.close(descriptor)
    agent = Agent(maps[1])
    agent.connect(opened["nixl"])
    send_line(connection, agent.described())
    end = ServerEnd(agent, connection, descriptors, maps, int(geometry["num_slots"]), shape)
    end.await_hello(_MEETING_SECONDS)
    end.say_hello()
    end.run()
