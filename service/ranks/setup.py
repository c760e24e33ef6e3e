"""What a rank is started with, and the memory of its two rings; imports no torch."""

import mmap
import pickle
from dataclasses import dataclass
from enum import Enum
from typing import IO, NamedTuple

from expertd.service.ranks.messages import end_bytes, move_bytes, step_bytes
from expertd.service.ranks.rendezvous import Rendezvous
from expertd.service.ranks.ring import Bell, Ring, ring_bytes
from expertd.service.settings.model import Settings

MAX_RUNNING = 2
"""Steps of a rank at a time, with memory of their own: one whose bytes are copied, and one that computes."""
MAX_SENT = MAX_RUNNING + 1
"""Steps that ranks have commands of at a time, so that one that has ended a step begins the next at once."""
NUM_SLOTS = MAX_SENT + 2  # of each ring: steps, a move of experts, and a rendezvous
SPIN_SECONDS = 50e-6  # before sleeping: the next step of a busy layer comes within it

# Messages over the socket: the first word, and what follows it.
SETUP = "setup"  # to a rank, with the descriptors of the pickled `RankSetup`, the rings and the two bells
MAP = "map"  # a region's number, bytes, offset, and whether it is a caller's, with its descriptor
OPEN = "open"  # a region's number, and GPU memory: the handle in hexadecimal digits, and the bytes
UNMAP = "unmap"  # a region's number
UNMAPPED = "unmapped"  # the answer, once the rank has closed it
STOP = "stop"  # end after the present step
LOADED = "loaded"  # from a rank: the names of its backend and device
DEVICE = "device"  # the fields of `RankDevice`, whenever they have changed
PARTITIONS = (
    "partitions"  # to a rank: as `partitions.replace`; from it: an error or "", and `partitions.shown`
)
FAILED = "failed"  # while loading: a sentence, and whether it is expected of wrong settings
LOST = "lost"  # from the proxy of a rank on another node: why that is lost
MAPPED = "mapped"  # a region's number; a sentence instead of "" if it could not be mapped
RECORD = "record"  # to a rank: BEGIN or END, between two steps, or TRACE, what times count from, and its file
BEGIN, END, TRACE = "begin", "end", "trace"
RECORDED = "recorded"  # the answer: the kind of an error and its text, or ""


class Role(Enum):
    """What a process does.

    HERE    it is a rank on the front end's node
    PROXY   it stands for a rank of another node, beside the front end
    REMOTE  it is that rank
    """

    HERE = "here"
    PROXY = "proxy"
    REMOTE = "remote"


@dataclass(frozen=True)
class RankSetup:
    """What one rank is: its number, and how to find the others.

    rendezvous     where the ranks meet
    generation  counts the groups of ranks, which must not meet each other
    """

    settings: Settings
    rank: int
    rendezvous: Rendezvous
    generation: int
    role: Role = Role.HERE

    @property
    def num_ranks(self) -> int:
        return self.settings.num_ranks

    @property
    def node(self) -> int:
        """The node of the rank."""
        return self.rank // self.settings.ranks_per_node

    @property
    def local_rank(self) -> int:
        """The rank's place among those of its node."""
        return self.rank % self.settings.ranks_per_node

    def write(self, file: IO[bytes]) -> None:
        """Write it for `read`, from the file's start."""
        pickle.dump(self, file)
        file.flush()

    @classmethod
    def read(cls, file: IO[bytes]) -> "RankSetup":
        """What the front end has written."""
        file.seek(0)
        setup = pickle.load(file)
        assert isinstance(setup, cls)
        return setup


class Rings(NamedTuple):
    """Both rings of a rank, and the bells that wake their readers."""

    commands: Ring
    ends: Ring
    command_bell: Bell
    end_bell: Bell


class RingSizes(NamedTuple):
    """The most bytes of a message in each ring."""

    command: int
    end: int

    @classmethod
    def of(cls, settings: Settings) -> "RingSizes":
        """A step has at most a request for each token."""
        ranks = settings.num_ranks
        max_experts = max(model.num_experts for model in settings.models)
        num_bytes = max(step_bytes(settings.limits.max_batch_tokens), move_bytes(ranks))
        return cls(num_bytes, end_bytes(max_experts))

    @property
    def total_bytes(self) -> int:
        """Bytes of the file with both rings."""
        return ring_bytes(NUM_SLOTS, self.command) + ring_bytes(NUM_SLOTS, self.end)

    def rings(self, descriptor: int, command_bell: Bell, end_bell: Bell) -> Rings:
        """Both rings in the file `descriptor`, one side of each."""
        view = memoryview(mmap.mmap(descriptor, self.total_bytes))
        middle = ring_bytes(NUM_SLOTS, self.command)
        commands = Ring(view[:middle], NUM_SLOTS, self.command)
        return Rings(commands, Ring(view[middle:], NUM_SLOTS, self.end), command_bell, end_bell)


def largest_expert(settings: Settings) -> int:
    """Bytes of the weights of an expert of the largest layer."""
    return max(model.shape.expert_bytes for model in settings.models)
