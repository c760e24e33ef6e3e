"""Dispatch and combine by NCCL, as a user of torch.distributed would write them, for what they cost alone.

It does less than ours, which favors it: rows stay in bf16, so nothing is quantized; a token goes to a rank
once, however many of its experts are there; sizes are known before; experts and weights are not sent, and
nothing is sorted by expert or weighted there.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks.rank_timing import Ranks, gathered

METHOD = (
    "NCCL: bf16 rows, a token once a rank, all_to_all_single there and back with sizes known before, and the "
    "copies of rows around them; experts and weights are not sent, nothing is sorted or weighted"
)


class NcclExchange:
    """One rank's calls; making it is collective.

    hidden_states    [T, H]
    topk_ids         int32 [T, top_k], experts of all ranks
    experts_of_rank  number of experts on each rank
    """

    def __init__(self, hidden_states: Tensor, topk_ids: Tensor, experts_of_rank: int, ranks: Ranks) -> None:
        owners = topk_ids // experts_of_rank
        wanted = torch.stack([(owners == rank).any(dim=1) for rank in range(ranks.count)])
        self._hidden_states = hidden_states
        self._tokens = wanted.nonzero()[:, 1]  # rank by rank
        self._send_counts: Sequence[int] = wanted.sum(dim=1).tolist()
        self._recv_counts = [counts[ranks.rank] for counts in gathered(self._send_counts, ranks)]
        self._received = hidden_states.new_empty(sum(self._recv_counts), hidden_states.shape[1])
        self._returned = hidden_states.new_empty(sum(self._send_counts), hidden_states.shape[1])
        self.out = torch.empty_like(hidden_states)

    def __call__(self, times: int = 1) -> None:
        """Send tokens, send back what was received as it is, and add it up in `out`, which is sent next."""
        hidden_states = self._hidden_states
        for _ in range(times):
            rows = hidden_states.index_select(0, self._tokens)
            dist.all_to_all_single(self._received, rows, self._recv_counts, self._send_counts)
            dist.all_to_all_single(self._returned, self._received, self._send_counts, self._recv_counts)
            hidden_states = self.out.zero_().index_add_(0, self._tokens, self._returned)
