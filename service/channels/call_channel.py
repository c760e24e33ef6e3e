"""A channel of calls that the caller's GPU makes by itself, in memory of both GPUs."""

import asyncio
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Self

from expertd.device_calls import REFUSED, CallSlot
from expertd.service.channels.open_channel import served
from expertd.service.engine.calls import CallServer
from expertd.service.engine.executor import Executor
from expertd.service.memory import SharedMemory
from expertd_client.channel.layout import aligned

_SEQUENCE = struct.Struct("<Q")
HEADER_BYTES = 128  # of a slot, in either memory: cache lines of its own


@dataclass(frozen=True, slots=True)
class CallGeometry:
    """The sizes of a channel in bytes. Each memory has the slots' headers first, then their rows.

    data_bytes    of the memory for calls, on the server's GPU
    slot_bytes    there, of a slot's rows, from `rows_offset + index * slot_bytes` on: hidden_states, and at
                  these offsets from them topk_ids and topk_weights
    answer_bytes  of the memory for answers, on the caller's GPU; its slots have `output_bytes` each
    """

    num_slots: int
    max_tokens: int
    hidden_size: int
    top_k: int
    data_bytes: int
    header_bytes: int
    rows_offset: int
    slot_bytes: int
    topk_ids_offset: int
    topk_weights_offset: int
    answer_bytes: int
    output_bytes: int

    @classmethod
    def for_slots(cls, num_slots: int, max_tokens: int, hidden_size: int, top_k: int) -> Self:
        """With room for `max_tokens` of bfloat16 in each slot."""
        rows, routing = aligned(max_tokens * hidden_size * 2), aligned(max_tokens * top_k * 4)
        headers, slot = aligned(num_slots * HEADER_BYTES, 4096), aligned(rows + 2 * routing, 4096)
        output = aligned(rows, 4096)
        return cls(
            num_slots, max_tokens, hidden_size, top_k, headers + num_slots * slot, HEADER_BYTES, headers,
            slot, rows, rows + routing, headers + num_slots * output, output,
        )  # fmt: skip

    def shown(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)

    def slots(self, calls: int, answers: SharedMemory) -> list[CallSlot]:
        """The slots of these memories, after the calls that `answers` says are answered."""
        found = []
        for index in range(self.num_slots):
            header, rows = index * HEADER_BYTES, self.rows_offset + index * self.slot_bytes
            found.append(
                CallSlot(
                    calls + header,
                    calls + rows,
                    calls + rows + self.topk_ids_offset,
                    calls + rows + self.topk_weights_offset,
                    answers.address + header,
                    answers.address + self.rows_offset + index * self.output_bytes,
                    self.max_tokens,
                    _SEQUENCE.unpack(answers.read(header, _SEQUENCE.size))[0] & ~REFUSED,
                )
            )
        return found


class CallChannel:
    """From its opening to its release. For the event loop.

    on_release  is called once no more answers come
    released    is set then, or if that failed
    """

    key, counted = "", True

    def __init__(
        self,
        number: int,
        models: Sequence[str],
        geometry: CallGeometry,
        memory: SharedMemory,
        calls: CallServer,
        executor: Executor,
    ) -> None:
        self.id, self.models, self.geometry = str(number), tuple(models), geometry
        self._memory, self._calls, self._executor = memory, calls, executor
        self._answers: SharedMemory | None = None
        self._slots: list[int] = []
        self.on_release: Callable[[], None] = lambda: None
        self.released = asyncio.Event()

    @property
    def served(self) -> str:
        """The names of the models, for log lines."""
        return served(self.models)

    @property
    def taken(self) -> int:
        """Calls so far."""
        return sum(map(self._calls.num_calls, self._slots))

    @property
    def has_fault(self) -> bool:
        """Whether the caller has sent an invalid header, and the channel must be closed."""
        return self._calls.has_fault(self._slots)

    async def connect(self, descriptors: Sequence[int]) -> None:
        """Answer calls from now on, in the memory for answers that the caller has; closes the descriptors.

        The caller may also have the memory for calls, of a server that has gone: what is called there and has
        no answer is computed now. Raises RuntimeError, ValueError.
        """
        try:
            if len(descriptors) not in (1, 2):
                raise ValueError(f"descriptors: expected 1 or 2, got {len(descriptors)}")
            await self._executor.between_steps(lambda: self._connect(*descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _connect(self, answers: int, calls: int | None = None) -> None:
        self._answers = self._calls.open_shared(answers, self.geometry.answer_bytes)
        if calls is not None:
            own, self._memory = self._memory, self._calls.open_shared(calls, self.geometry.data_bytes)
            own.close()
        slots = self.geometry.slots(self._memory.address, self._answers)
        self._slots = self._calls.connect(self.models, slots)

    def take_descriptors(self) -> list[int]:
        """A new descriptor of the memory for calls."""
        return [self._memory.descriptor()]

    async def release(self) -> None:
        """Answer no more calls, and forget the memory."""
        memories = [memory for memory in (self._memory, self._answers) if memory is not None]
        slots, self._slots = self._slots, []
        try:
            disconnect = partial(self._calls.disconnect, slots, *memories)
            await asyncio.shield(self._executor.between_steps(disconnect))
        finally:
            self.on_release()
