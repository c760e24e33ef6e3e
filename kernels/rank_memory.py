"""Memory that the ranks of an expert-parallel layer share over NVLink; csrc/ranks.cuh has the protocol."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from expertd.limits import HIDDEN_STEP, MAX_GROUPS, MAX_RANK_PAIRS, MAX_RANKS, SCALE_BLOCK

MAX_SEGMENTS = 8
"""Parts of a rank's pairs, each of which a CTA of csrc/permutation_of_ranks.cu sorts."""
_COUNTER_BYTES = MAX_RANKS * 128
_ALIGNMENT = 1024
_PARTS = 6  # of a rank's memory
_TAKEN_COLUMNS = 1024  # of a token; no CTA that takes tokens from a counter has fewer
# csrc/ranks.cuh: the memories, then num_ranks, rank, calls, max_pairs, status, timeout, max_own_tokens, here
_RANKS = struct.Struct(f"<{_PARTS * MAX_RANKS}Q4I4Q")
_TOKEN_BITS = 20  # of a rank's tokens, of which there are at most MAX_RANK_PAIRS


@dataclass(frozen=True, slots=True)
class RankTokens:
    """How a call's tokens, and the experts, are spread over the ranks.

    counts  tokens of each rank
    places  int32 [E] on the device: rank * 65536 + group there, of each expert
    """

    counts: tuple[int, ...]
    places: Tensor

    @property
    def num_tokens(self) -> int:
        """The tokens of all ranks."""
        return sum(self.counts)

    def first(self, rank: int) -> int:
        """The number of the rank's first token, among those of all."""
        return sum(self.counts[:rank])

    @property
    def packed(self) -> tuple[np.uint64, np.uint64, np.uint64]:
        """The counts as launches take them: 20 bits a rank, three ranks a word; see csrc/ranks.cuh."""
        words = [0, 0, 0]
        for rank, count in enumerate(self.counts):
            words[rank // 3] |= count << (rank % 3 * _TOKEN_BITS)
        return np.uint64(words[0]), np.uint64(words[1]), np.uint64(words[2])


def part_bytes(
    num_ranks: int, max_own_tokens: int, max_tokens: int, hidden_size: int, top_k: int, exact: bool
) -> tuple[int, ...]:
    """The bytes of each part of a rank's memory, with the arguments of `RankMemory`."""
    sizes = (
        _COUNTER_BYTES,
        MAX_GROUPS * MAX_RANKS * MAX_SEGMENTS * 4,
        2 * max_tokens * top_k * 8,
        max_tokens * hidden_size,
        max_tokens * math.ceil(hidden_size / SCALE_BLOCK) * 4,
        (top_k if exact else num_ranks) * max_own_tokens * hidden_size * 2,
    )
    return tuple(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


class RankMemory:
    """One rank's memory, and the addresses of all others'. Collective: all ranks make it together.

    group           on GPUs of one host, each with access to the others; at most 8 ranks
    max_own_tokens  maximum tokens of a rank in one call
    max_tokens      maximum tokens of all ranks in one call
    timeout         seconds that a launch waits for another rank before it gives up (see `late_rank`)
    exact           ranks return each expert's row, not one sum for each token: the bits of one GPU, for up to
                    top_k times the bytes

    Raises ValueError (name, expected, got).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        max_own_tokens: int,
        max_tokens: int,
        hidden_size: int,
        top_k: int,
        timeout: float,
        exact: bool = False,
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        num_ranks = group.size()
        if num_ranks > MAX_RANKS:
            raise ValueError(f"group size: expected at most {MAX_RANKS}, got {num_ranks}")
        if hidden_size % HIDDEN_STEP:
            raise ValueError(f"hidden_size: expected a multiple of {HIDDEN_STEP}, got {hidden_size}")
        if max_own_tokens * top_k > MAX_RANK_PAIRS:
            expected = f"at most {MAX_RANK_PAIRS // top_k} with a top_k of {top_k}"
            raise ValueError(f"max_own_tokens: expected {expected}, got {max_own_tokens}")
        self.group, self.num_ranks, self.rank = group, num_ranks, group.rank()
        self.hidden_size, self.top_k = hidden_size, top_k
        self.max_own_tokens, self.max_tokens, self.exact = max_own_tokens, max_tokens, exact
        sizes = part_bytes(num_ranks, max_own_tokens, max_tokens, hidden_size, top_k, exact)
        starts = list(accumulate(sizes, initial=0))
        self._bytes = symmetric_memory.empty(starts[-1], dtype=torch.uint8, device=device)
        self._bytes[: starts[1]] = 0
        self._bytes[starts[1] :] = 0xFF  # kNothing: no call has written anything
        self.dispatch_counters, self.combine_counters = torch.zeros(
            (2, math.ceil(hidden_size / _TAKEN_COLUMNS)), dtype=torch.int32, device=device
        )
        """From which CTAs of dispatch_rows, and of combine_rows, take tokens; 0 between launches."""
        torch.cuda.synchronize(device)
        self._handle = symmetric_memory.rendezvous(self._bytes, group)
        self.consumed = self._bytes[: starts[1]].view(torch.int32)
        """The own counters of csrc/ranks.cuh, for launches."""
        self._status = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.ranks = torch.empty(_RANKS.size, dtype=torch.uint8, device=device)
        """For launches: the addresses and counters of csrc/ranks.cuh."""
        self.ranks.copy_(self._state(self._handle.buffer_ptrs, starts, timeout))

    @property
    def late_rank(self) -> int | None:
        """The rank that a launch has waited for in vain; from then on results are undefined."""
        status = int(self._status.item())
        return status - 1 if status else None

    def check(self, counts: Sequence[int]) -> None:
        """Raise ValueError (name, expected, got) if there is no room for counts[r] tokens of rank r."""
        if len(counts) != self.num_ranks:
            raise ValueError(f"counts: expected {self.num_ranks}, got {len(counts)}")
        if max(counts) > self.max_own_tokens:
            raise ValueError(f"counts: expected at most {self.max_own_tokens} each, got {max(counts)}")
        if sum(counts) > self.max_tokens:
            raise ValueError(f"counts: expected at most {self.max_tokens} in all, got {sum(counts)}")

    def _state(self, bases: Sequence[int], starts: Sequence[int], timeout: float) -> Tensor:
        addresses = [base + start for base in bases for start in starts[:-1]]
        addresses += [0] * (_PARTS * MAX_RANKS - len(addresses))
        packed = _RANKS.pack(
            *addresses, self.num_ranks, self.rank, 0, self.max_tokens * self.top_k,
            self._status.data_ptr(), int(timeout * 1e9), self.max_own_tokens, self.ranks.data_ptr(),
        )  # fmt: skip
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
