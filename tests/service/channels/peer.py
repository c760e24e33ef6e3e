"""The caller's side of a channel, as docs/internals/channels.md describes it, with the standard library."""

import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GREETING = b"expertd\0" + struct.pack("<I", 3)
HEADER = struct.Struct("<8s6I7Q")
REQUEST = struct.Struct("<IBBHQQQQQII")
ANSWER = struct.Struct("<IIIIQQ")
CODES = {"BF16": 1, "FP16": 2, "FP32": 3, "FP8": 4}
ROUTED = 1


class ChannelClosedError(Exception):
    """The server has closed the channel, or is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; error is "" for status 200, times are in seconds."""

    status: int
    error: str
    retry_after: float
    queue_seconds: float
    compute_seconds: float


class Peer:
    """A claimed channel. For one thread at a time."""

    def __init__(self, opened: Mapping[str, Any], spin_seconds: float = 50e-6) -> None:
        """Claim the channel that POST /v1/channels answered with. Raises ChannelClosedError."""
        self._spin_seconds = spin_seconds
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(opened["socket"])
        self.socket.sendall(bytes.fromhex(opened["token"]))
        greeting, descriptors, _, _ = socket.recv_fds(self.socket, len(GREETING), 4)
        if greeting != GREETING:
            self.socket.close()
            raise ChannelClosedError("the server does not know the token, or speaks another version")
        control, *data, self.bell, self.answers = descriptors
        self.control = mmap.mmap(control, os.fstat(control).st_size)
        header = HEADER.unpack_from(self.control)
        (_, _, self.header_bytes, self.num_slots, self.max_tokens, self.hidden_size, self.top_k) = header[:7]
        (self.data_bytes, self.data_slot_bytes, *self.offsets, _) = header[7:]
        slot_bytes = (len(self.control) - self.header_bytes) // self.num_slots
        self.starts = [self.header_bytes + index * slot_bytes for index in range(self.num_slots)]
        self.words = memoryview(self.control).cast("Q")
        self.data = memoryview(mmap.mmap(data[0], self.data_bytes)) if data else None
        for descriptor in (control, *data):
            os.close(descriptor)
        self.sequence = 0  # of the latest request
        self._poll = select.poll()
        self._poll.register(self.answers, select.POLLIN)
        self._poll.register(self.socket, select.POLLIN)

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A part of the data region."""
        assert self.data is not None
        return np.frombuffer(self.data, dtype, int(np.prod(shape)), offset).reshape(shape)

    def places(self, sequence: int) -> tuple[int, int, int, int]:
        """The default places of request `sequence`: hidden_states, topk_ids, topk_weights, output."""
        start = (sequence - 1) % self.num_slots * self.data_slot_bytes
        first, second, third, fourth = (start + offset for offset in self.offsets)
        return first, second, third, fourth

    def send(
        self,
        num_tokens: int,
        places: tuple[int, int, int, int],
        datatype: str = "FP32",
        output_datatype: str = "FP32",
        routed: bool = False,
        timeout: float = 0.0,
        model: int = 0,
        priority: int = 0,
    ) -> int:
        """Send a request whose tensors are at `places`, in the next slot; returns its sequence number."""
        sequence = self.sequence + 1
        codes = CODES[datatype], CODES[output_datatype], ROUTED if routed else 0
        self.write(sequence, REQUEST.pack(num_tokens, *codes, int(timeout * 1e6), *places, priority, model))
        self.sequence = sequence
        return sequence

    def write(self, sequence: int, line: bytes) -> None:
        """Write a request line, its sequence last, and ring."""
        start = self.starts[(sequence - 1) % self.num_slots]
        self.control[start + 8 : start + 8 + len(line)] = line
        self.words[start // 8] = sequence
        self.ring()

    def announce(self, sequence: int, line: bytes) -> int:
        """Write a request line whose sequence another processor will write; the word to which it does."""
        start = self.starts[(sequence - 1) % self.num_slots]
        self.control[start + 8 : start + 8 + len(line)] = line
        self.words[200 // 8] = sequence
        self.ring()
        return int(start // 8)

    def has_failed(self, sequence: int) -> bool:
        """Whether request `sequence`, for which a stream waits, has an error instead of an answer."""
        return bool(self.words[(self.starts[(sequence - 1) % self.num_slots] + 128 + 56) // 8] == sequence)

    def cancel(self, sequence: int) -> None:
        """Cancel request `sequence`, if it is still queued."""
        self.words[(self.starts[(sequence - 1) % self.num_slots] + 64) // 8] = sequence
        self.words[192 // 8] += 1
        self.ring()

    def ring(self) -> None:
        """Tell the server that a request has been written."""
        os.eventfd_write(self.bell, 1)

    def answered(self, sequence: int) -> bool:
        """Whether the answer to request `sequence` has been written; valid until its slot is used again."""
        return bool(self.words[(self.starts[(sequence - 1) % self.num_slots] + 128) // 8] == sequence)

    def expired(self, sequence: int) -> bool:
        """Whether the server has said that the timeout of request `sequence` passed during its step."""
        return bool(self.words[(self.starts[(sequence - 1) % self.num_slots] + 128 + 48) // 8] == sequence)

    def is_in_time(self, sequence: int, seconds: float = 60.0) -> bool:
        """Wait for the answer to request `sequence`; False if its timeout passed during its step.

        Raises as `wait`, for which it is then still too early.
        """
        self._wait_until(lambda: self.answered(sequence) or self.expired(sequence), seconds)
        return self.answered(sequence)

    def wait(self, sequence: int, seconds: float = 60.0) -> Answer:
        """The answer to request `sequence`, or its error. Raises ChannelClosedError, TimeoutError."""
        self._wait_until(lambda: self.answered(sequence) or self.has_failed(sequence), seconds)
        deadline = time.perf_counter() + seconds
        start = self.starts[(sequence - 1) % self.num_slots] + 128
        status, length, retry_after, _, _, _ = ANSWER.unpack_from(self.control, start + 8)
        while self.words[start // 8 + 5] != sequence:  # the times follow the answer
            assert time.perf_counter() < deadline
        _, _, _, _, queue, compute = ANSWER.unpack_from(self.control, start + 8)
        error = self.control[start + 64 : start + 64 + length].decode(errors="replace")
        return Answer(status, error, retry_after / 1e3, queue / 1e9, compute / 1e9)

    def _wait_until(self, is_there: Callable[[], bool], seconds: float) -> None:
        now = time.perf_counter()
        end, deadline = now + self._spin_seconds, now + seconds
        while not is_there():
            if time.perf_counter() < end:
                continue
            self._sleep(is_there, deadline)

    def _sleep(self, is_there: Callable[[], bool], deadline: float) -> None:
        """Clear the pipe, look at the memory, and only then sleep: so no answer is missed."""
        with suppress(BlockingIOError):
            os.read(self.answers, 65536)
        if is_there():
            return
        left = deadline - time.perf_counter()
        if left <= 0:
            raise TimeoutError(f"request {self.sequence} or one before it has no answer")
        for descriptor, _ in self._poll.poll(left * 1e3):
            if descriptor == self.socket.fileno() and not is_there():
                raise ChannelClosedError("the server has closed the channel")

    def infer(
        self,
        hidden_states: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32] | None = None,
        topk_weights: npt.NDArray[np.float32] | None = None,
        timeout: float = 0.0,
    ) -> npt.NDArray[np.float32]:
        """The layer's output in FP32. Raises ValueError for any status but 200."""
        places = self.places(self.sequence + 1)
        self.array(places[0], hidden_states.shape, np.float32)[:] = hidden_states
        if topk_ids is not None and topk_weights is not None:
            self.array(places[1], topk_ids.shape, np.int32)[:] = topk_ids
            self.array(places[2], topk_weights.shape, np.float32)[:] = topk_weights
        routed = topk_ids is not None
        answer = self.wait(self.send(len(hidden_states), places, routed=routed, timeout=timeout))
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {answer.error}")
        return self.array(places[3], hidden_states.shape, np.float32).copy()

    def close(self) -> None:
        """Give the channel up."""
        self.words.release()
        self.socket.close()
        os.close(self.bell)
        os.close(self.answers)
