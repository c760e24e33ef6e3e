"""The interface of communication between the ranks of a layer; it moves rows, and computes nothing.

The layer reads no sizes on the host beyond the shapes of tensors. So an exchange whose device alone knows how
many tokens arrive can return tensors of its capacity, whose last rows are padding.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class ExchangeError(RuntimeError):
    """The ranks could not exchange tokens or rows; the message names the operation."""


@dataclass(frozen=True)
class Combined:
    """Rows that have come back for this rank's t tokens.

    rows   [M, H]
    index  int32 [t, C]: for each token its row from each rank (C = ranks), or of each slot (C = top_k); -1:
           none. Which rows arrived first does not change it
    """

    rows: Tensor
    index: Tensor


class Dispatched(ABC):
    """The tokens that all ranks sent here, and the way back for their rows.

    hidden_states  [N, H], those from rank 0 first, each rank's in the order of its tokens
    topk_ids       int32 [N, top_k], as on the token's own rank; -1 throughout in rows of padding
    topk_weights   fp32 [N, top_k]

    None need be contiguous.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    @abstractmethod
    def combine(self, rows: Tensor) -> Combined:
        """Send each token's row home: rows [N, H], of the row dtype, contiguous. Collective."""

    @abstractmethod
    def combine_slots(self, rows: Tensor) -> Combined:
        """As `combine`, for rows [P, H]: one for each slot of each token, if its expert is here."""


class Exchange(ABC):
    """Connects the ranks of one layer. Every rank makes the same calls in the same order.

    rank       this one, from 0
    num_ranks  their number R
    failed     why it can no longer be used, so that all ranks have to start again; None: it can
    """

    rank: int
    num_ranks: int
    failed: str | None

    @abstractmethod
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        owners: Tensor,
        row_dtype: torch.dtype,
    ) -> Dispatched:
        """Send each token once to each rank that owns an expert of one of its slots. Collective.

        hidden_states  [t, H]; t may differ between ranks, and be 0
        topk_ids       int32 [t, top_k]
        topk_weights   fp32 [t, top_k]
        owners         int64 [t, top_k], the rank that holds each slot's expert; num_ranks: none does
        row_dtype      of the rows that come back

        Raises ExchangeError if a rank does not take part, refused its arguments, or passed other dtypes.
        """

    @abstractmethod
    def refuse(self) -> None:
        """Take part in a dispatch whose arguments this rank cannot use, so that it fails on all ranks."""
