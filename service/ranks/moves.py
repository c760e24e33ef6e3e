"""Commands that change a placement, in the ring of steps: parts of experts to send, and switches.

All ranks carry out a command between the same two steps. What they say about it comes back over the socket,
where it delays no step.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from expertd.service.moe.placement.rounds import Fetch

NO_STEP = bytes(8)  # a step's command begins with its number, which is never 0
MOVED = "moved"  # from a rank: a command's number, its seconds, and a sentence instead of "" if it failed

# 0, number, model, fetches, kind, start and end of the bytes, region
_HEAD = struct.Struct("<QQIII4xQQQ")
_FETCH = struct.Struct("<III4x")


class Kind(IntEnum):
    """What ranks do with the experts of a round.

    FETCH    send and receive bytes `start` to `end` of each
    PREPARE  the matrix number `start` of each, for the switch
    SWITCH   put them into their slots; all ranks use the new placement from here on
    """

    FETCH = 0
    PREPARE = 1
    SWITCH = 2


@dataclass(frozen=True, slots=True)
class MoveCommand:
    """A part of a round.

    region  of the memory that ranks fetch into, if they share it; see `SharedTransport`
    """

    number: int
    model: int
    kind: Kind
    fetches: Sequence[Fetch]
    start: int = 0
    end: int = 0
    region: int = 0

    def packed(self) -> bytes:
        count, span = len(self.fetches), (self.start, self.end)
        head = _HEAD.pack(0, self.number, self.model, count, self.kind, *span, self.region)
        return head + b"".join([_FETCH.pack(*fetch) for fetch in self.fetches])

    @classmethod
    def unpacked(cls, data: bytes) -> "MoveCommand":
        _, number, model, count, kind, start, end, region = _HEAD.unpack_from(data)
        starts = range(_HEAD.size, _HEAD.size + count * _FETCH.size, _FETCH.size)
        return cls(
            number,
            model,
            Kind(kind),
            [Fetch(*_FETCH.unpack_from(data, at)) for at in starts],
            start,
            end,
            region,
        )


def move_bytes(num_ranks: int) -> int:
    """The most bytes of a command: each rank fetches one expert at a time."""
    return _HEAD.size + num_ranks * _FETCH.size
