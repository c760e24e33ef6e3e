"""How the weights of experts travel from rank to rank."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from expertd.service.device import device_of
from expertd.service.memory import host_view
from expertd.service.ranks.worker.own_steps import SpanOf

_ALIGNMENT = 4096


class Send(NamedTuple):
    """Contiguous memory uint8 [n], for the bytes from `offset` on of what `rank` fetches."""

    memory: Tensor
    rank: int
    offset: int


class Receive(NamedTuple):
    """The bytes `offset` to `end` of what this rank fetches, which come from `rank`."""

    rank: int
    offset: int
    end: int


class RankTransport(Protocol):
    """Moves bytes between the ranks."""

    def connect(self) -> None:
        """Do what the first `exchange` would otherwise do. Collective."""

    def fetched(self, region: int) -> Tensor:
        """Where this rank's bytes arrive: uint8, enough for one expert. `region`: see `MoveCommand`."""

    def exchange(self, region: int, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """Send and receive all of these. Every rank that has a part in it calls, between the same two steps.

        The bytes are there once it has returned on all ranks. Raises RuntimeError if a rank is gone.
        """


class SharedTransport:
    """For ranks that share their machine's memory and compute in it: who sends writes to where it is fetched.

    num_bytes  of the largest expert
    """

    def __init__(self, rank: int, num_bytes: int, span_of: SpanOf) -> None:
        self._rank, self._num_bytes, self._span_of = rank, num_bytes, span_of

    def connect(self) -> None:
        """See `RankTransport.connect`."""

    def fetched(self, region: int) -> Tensor:
        """See `RankTransport.fetched`."""
        return self._memory(region, self._rank)

    def exchange(self, region: int, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See `RankTransport.exchange`."""
        for memory, rank, offset in sends:
            self._memory(region, rank)[offset : offset + len(memory)].copy_(memory)

    def _memory(self, region: int, rank: int) -> Tensor:
        span = self._span_of(region, rank * spaced(self._num_bytes), self._num_bytes)
        return torch.frombuffer(host_view(span), dtype=torch.uint8)


class TorchTransport:
    """Over the default process group: NCCL, and so NVLink, between GPUs; gloo between machines' CPUs."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._fetched = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def connect(self) -> None:
        """See `RankTransport.connect`: NCCL connects two ranks when they first exchange anything."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        others = [other for other in range(num_ranks) if other != rank]
        sent = torch.zeros(1, dtype=torch.uint8, device=self._fetched.device)
        self.exchange(0, [Send(sent, to, 0) for to in others], [Receive(other, 0, 1) for other in others])

    def fetched(self, region: int) -> Tensor:
        """See `RankTransport.fetched`."""
        return self._fetched

    def exchange(self, region: int, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See `RankTransport.exchange`. What one rank sends to another arrives in the same order."""
        operations = [
            *(dist.P2POp(dist.isend, send.memory, send.rank) for send in sends),
            *(dist.P2POp(dist.irecv, self._fetched[part.offset : part.end], part.rank) for part in receives),
        ]
        if not operations:
            return
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        device_of(self._fetched.device).synchronize()


class PeerTransport:
    """For ranks of the default group whose GPUs reach each other's memory; see `RankTransport`. Collective.

    Who sends writes to where it is fetched, which every rank has mapped.

    num_bytes  of the largest expert
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None
        self._fetched = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(self._fetched, group)
        self._of_ranks = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size())]

    def connect(self) -> None:
        """See `RankTransport.connect`: the memory is mapped already."""

    def fetched(self, region: int) -> Tensor:
        """See `RankTransport.fetched`."""
        return self._fetched

    def exchange(self, region: int, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See `RankTransport.exchange`; the caller waits for the GPU."""
        for memory, rank, offset in sends:
            self._of_ranks[rank][offset : offset + len(memory)].copy_(memory, non_blocking=True)


def spaced(num_bytes: int) -> int:
    """Bytes from one rank's part of a shared region to the next."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
