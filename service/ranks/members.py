"""The command that makes ranks meet, in the ring of steps: it says which of them form a group.

Ranks carry it out at the same place among the steps: those before it run in the old group, all others in the
new one. What they say about it comes back over the socket.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MEET = bytes(16)  # neither the number of a step nor that of a move is ever 0
MET = "met"  # from a rank: the generation, and a sentence instead of "" if they did not meet

_HEAD = struct.Struct("<QQQ")  # 0, 0, generation; the members follow


@dataclass(frozen=True, slots=True)
class MeetCommand:
    """The ranks `members`, by their numbers, meet as group `generation`."""

    generation: int
    members: Sequence[int]

    def packed(self) -> bytes:
        return _HEAD.pack(0, 0, self.generation) + struct.pack(f"<{len(self.members)}Q", *self.members)

    @classmethod
    def unpacked(cls, data: bytes) -> "MeetCommand":
        members = memoryview(data)[_HEAD.size :].cast("Q").tolist()
        return cls(_HEAD.unpack_from(data)[2], members)


def meet_bytes(num_ranks: int) -> int:
    """The most bytes of a command."""
    return _HEAD.size + 8 * num_ranks
