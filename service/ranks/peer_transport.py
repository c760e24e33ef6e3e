"""How the weights of experts travel between the GPUs of one machine: by copies over NVLink."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from expertd.service.ranks.transport import Receive, Send


class PeerTransport:
    """For ranks of the default group whose GPUs reach each other's memory; see `Transport`. Collective.

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
        """See `Transport.connect`: the memory is mapped already."""

    def fetched(self, region: int) -> Tensor:
        """See `Transport.fetched`."""
        return self._fetched

    def exchange(self, region: int, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See `Transport.exchange`; the caller waits for the GPU."""
        for memory, rank, offset in sends:
            self._of_ranks[rank][offset : offset + len(memory)].copy_(memory, non_blocking=True)
