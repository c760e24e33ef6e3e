"""The other side of a ring, in a process of its own: it adds 1 to each number, until 0.

`python ring_program.py SLOTS SLOT_BYTES MEMORY THEIR_BELL OUR_BELL`, the last three descriptors. The memory
has two rings: to this process, and back.
"""

import mmap
import sys

from expertd.service.ranks.ring import Bell, Ring, ring_bytes


def main() -> None:
    """Answer until a 0."""
    num_slots, slot_bytes, memory, theirs, ours = map(int, sys.argv[1:])
    middle = ring_bytes(num_slots, slot_bytes)
    view = memoryview(mmap.mmap(memory, 2 * middle))
    inward, back = (Ring(part, num_slots, slot_bytes) for part in (view[:middle], view[middle:]))
    their_bell, our_bell = Bell(theirs), Bell(ours)
    number = -1
    while number:
        our_bell.wait(lambda: not inward.is_empty(), 50e-6)
        message = inward.take()
        assert message is not None
        number = int.from_bytes(message[:8], "little")
        back.put((number + 1).to_bytes(8, "little") + message[8:])
        their_bell.ring()


if __name__ == "__main__":
    main()
