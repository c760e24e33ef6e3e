"""The sizes of a channel's memory; imports no torch."""

from dataclasses import asdict, dataclass, replace
from typing import Self

from expertd_client.channel.layout import (
    ANSWER_OFFSET,
    ERROR_BYTES,
    ERROR_OFFSET,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    SLOT_BYTES,
    VERSION,
    aligned,
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a channel, and the default place of each slot's tensors in the data region, in bytes.

    Slot i has the default places i * data_slot_bytes + the four offsets; data_slot_bytes is 0 if there are
    none, and the caller places its tensors itself.
    """

    num_slots: int
    max_tokens: int
    hidden_size: int
    top_k: int
    data_bytes: int
    data_slot_bytes: int
    hidden_states_offset: int
    topk_ids_offset: int
    topk_weights_offset: int
    output_offset: int

    @classmethod
    def for_slots(
        cls, num_slots: int, max_tokens: int, hidden_size: int, top_k: int, element_bytes: int
    ) -> Self:
        """A region with room for `max_tokens` of `element_bytes` in every slot."""
        rows = aligned(max_tokens * hidden_size * element_bytes)
        routing = aligned(max_tokens * top_k * 4)
        slot = aligned(2 * rows + 2 * routing, 4096)
        offsets = (0, rows, rows + routing, rows + 2 * routing)
        return cls(num_slots, max_tokens, hidden_size, top_k, num_slots * slot, slot, *offsets)

    def within(self, data_bytes: int) -> Self:
        """The same in a region of `data_bytes`: without default places if they do not fit."""
        if data_bytes >= self.data_bytes:
            return replace(self, data_bytes=data_bytes)
        return type(self)(
            self.num_slots, self.max_tokens, self.hidden_size, self.top_k, data_bytes, 0, 0, 0, 0, 0
        )

    @property
    def control_bytes(self) -> int:
        return HEADER_BYTES + self.num_slots * SLOT_BYTES

    def header(self) -> bytes:
        """The start of the control memory."""
        values = asdict(self).values()
        return HEADER.pack(MAGIC, VERSION, HEADER_BYTES, *values, self.control_bytes)

    def shown(self) -> dict[str, int]:
        """For JSON: the fields, and the constants of this version."""
        return asdict(self) | {
            "control_bytes": self.control_bytes,
            "header_bytes": HEADER_BYTES,
            "slot_bytes": SLOT_BYTES,
            "answer_offset": ANSWER_OFFSET,
            "error_offset": ERROR_OFFSET,
            "error_bytes": ERROR_BYTES,
        }
