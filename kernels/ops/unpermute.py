"""The weighted sum of the rows that a token's experts made."""

import torch
from torch import Tensor

from expertd.kernels.ops.chunks import row_chunks

_CHUNK_ELEMENTS = 1 << 18  # of the output, on a CPU: a slot's rows and their sum stay in L2


def combine_rows(
    rows: Tensor,
    row_of_pair: Tensor,
    weights: Tensor,
    absent: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[t] = sum over s of weights[t, s] * rows[row_of_pair[t, s]], in the order of slots.

    rows [R, H]; row_of_pair int64 and weights fp32 [T, S]; absent bool [T, S], the pairs left out, whatever
    their rows and weights hold (None: none). out [T, H], summed in fp32 (None: a new one of fp32).
    """
    num_tokens, num_slots = weights.shape
    if out is None:
        out = torch.empty((num_tokens, rows.shape[1]), device=rows.device)
    if out.dtype != torch.float32:
        return out.copy_(combine_rows(rows, row_of_pair, weights, absent))
    out.zero_()
    if absent is not None:
        weights = weights.masked_fill(absent, 0.0)
    parts = [out, row_of_pair, weights] if absent is None else [out, row_of_pair, weights, absent]
    for out_part, row_part, weights_part, *absent_part in row_chunks(*parts, elements=_CHUNK_ELEMENTS):
        for slot in range(num_slots):
            picked = rows.index_select(0, row_part[:, slot]).to(torch.float32)
            if absent_part:  # never computed: what lies there may be NaN, which a weight of 0 would keep
                picked.masked_fill_(absent_part[0][:, slot, None], 0.0)
            out_part.addcmul_(picked, weights_part[:, slot, None])
    return out
