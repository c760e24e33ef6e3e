"""A channel whose answers are written by the test."""

import mmap
import os
import socket

import numpy as np
import torch

from expertd_client.arenas import Sizes
from expertd_client.channel.base import Made
from expertd_client.channel.claiming import Claimed
from expertd_client.channel.layout import (
    ANSWER,
    ANSWER_OFFSET,
    HEADER_BYTES,
    MODEL,
    SLOT_BYTES,
    TIMES_OFFSET,
    WORD_BYTES,
    aligned,
)
from expertd_client.channel.link import ChannelClient
from expertd_client.channel.opening import Opened
from expertd_client.channel.slots import Shapes, make_slots
from expertd_client.deadline import Deadline
from expertd_client.steps import Steps

HIDDEN, TOP_K = 8, 2


class ChannelByHand:
    """The server's side. Its slots are as many as the caller's places.

    `on_device`: the tensor that stands for memory of a GPU
    """

    def __init__(self, num_slots: int, max_tokens: int = 1, on_device: bool = False) -> None:
        self.shapes = Shapes(max_tokens, HIDDEN, TOP_K, "FP32", "FP32")
        control = mmap.mmap(-1, HEADER_BYTES + num_slots * SLOT_BYTES)
        self._view = memoryview(control)
        self._words = self._view.cast("Q")
        self._num_slots = num_slots
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        answers, self._answers = os.pipe2(os.O_NONBLOCK)
        self._connection, connection = socket.socketpair()
        self._is_open = True
        claimed = Claimed("1", num_slots, control, None, os.dup(self._bell), answers, connection)
        self.link = ChannelClient(claimed, spin_seconds=0)
        sizes = Sizes(max_tokens, aligned(self.shapes.layout.num_bytes, 4096), num_slots)
        data = np.zeros(sizes.num_bytes, np.uint8)
        self.device = torch.from_numpy(data) if on_device else None
        self.opened = Opened(self.link, sizes, HIDDEN, TOP_K, None if on_device else data, self.device)

    def made(self) -> Made:
        """What a channel of a caller is made of, which cannot be opened again."""
        slots = make_slots(self.opened, self.shapes, self.device is not None)

        def reopen(lost: Opened, deadline: Deadline) -> Steps[Opened]:
            raise lost.link.closed_error()
            yield

        return Made(self.opened, self.shapes, slots, {"m": MODEL.pack(0)}, Deadline(60), reopen)

    def answer(self, sequence: int, queue_ns: int = 0) -> None:
        """Answer a request with 200, and ring."""
        start = self._start(sequence) + ANSWER_OFFSET
        ANSWER.pack_into(self._view, start + WORD_BYTES, 200, 0, 0, 0, queue_ns, 0)
        self._words[(start + TIMES_OFFSET) // WORD_BYTES + 2] = sequence
        self._words[start // WORD_BYTES] = sequence
        os.write(self._answers, b"\1")

    def sent(self, sequence: int) -> bool:
        """Whether the caller has sent it."""
        return bool(self._words[self._start(sequence) // WORD_BYTES] == sequence)

    def close(self) -> None:
        """As a server that gives the channel up."""
        if self._is_open:
            self._is_open = False
            self._connection.close()
            os.close(self._answers)
            os.close(self._bell)

    def _start(self, sequence: int) -> int:
        return HEADER_BYTES + (sequence - 1) % self._num_slots * SLOT_BYTES
