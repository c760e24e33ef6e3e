"""Launches csrc/gather_rows.cu: brings the rows of a step's requests together."""

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source, no_shared_bytes
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.request_table import MAX_GIVEN_TOP_K, RequestTable

_THREADS = 256

VARIANT = Variant(named_source("gather_rows"), _THREADS, no_shared_bytes)


def gather_rows(
    kernels: Kernels,
    on: OnStream,
    table: RequestTable,
    hidden_states: Tensor,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    num_experts: int,
) -> None:
    """Write hidden_states bf16 [T, H], and with supplied routing topk_ids and topk_weights [T, top_k].

    Ids outside 0 to num_experts - 1 become -1.
    """
    num_tokens, h = hidden_states.shape
    top_k = 0 if topk_ids is None else topk_ids.shape[1]
    if top_k > MAX_GIVEN_TOP_K:
        raise ValueError(f"topk_ids top_k: expected at most {MAX_GIVEN_TOP_K}, got {top_k}")
    kernels.launch(
        on, VARIANT, Grid(num_tokens),
        table.address, np.int32(h), np.int32(top_k), np.int32(num_experts),
        hidden_states, topk_ids, topk_weights,
    )  # fmt: skip
