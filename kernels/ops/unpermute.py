"""The weighted sum of each token's permuted rows."""

import torch
from torch import Tensor

from expertd.kernels.ops.checks import check_unpermute
from expertd.kernels.ops.chunks import row_chunks

_CHUNK_ELEMENTS = 1 << 18  # of the output, on a CPU: a slot's rows and their sum stay in L2


@torch.no_grad()
def unpermute_rows(
    rows: Tensor,
    inverse_permutation: Tensor,
    topk_weights: Tensor,
    absent: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[t] = sum over s of topk_weights[t, s] * rows[inverse_permutation[t, s]], in the order of slots.

    rows                 [R, H]
    inverse_permutation  int64 or int32 [T, top_k], see `Permutation`
    topk_weights         fp32 [T, top_k]
    absent               bool [T, top_k], pairs to leave out, whatever their rows and weights are; None: none
    out                  [T, H], summed in fp32; None: a new one of fp32

    Returns out, without gradients. Raises ValueError (name, expected, got).
    """
    check_unpermute(rows, inverse_permutation, topk_weights, absent, out)
    num_tokens, top_k = topk_weights.shape
    if out is None:
        out = torch.empty((num_tokens, rows.shape[1]), dtype=torch.float32, device=rows.device)
    if out.dtype != torch.float32:
        return out.copy_(unpermute_rows(rows, inverse_permutation, topk_weights, absent))
    out.zero_()
    if absent is not None:
        topk_weights = topk_weights.masked_fill(absent, 0.0)
    parts = [out, inverse_permutation, topk_weights, *([] if absent is None else [absent])]
    for out_part, inverse_part, weights_part, *absent_part in row_chunks(*parts, elements=_CHUNK_ELEMENTS):
        for slot in range(top_k):
            picked = rows.index_select(0, inverse_part[:, slot]).to(torch.float32)
            if absent_part:  # never computed: the memory may hold NaN, which a weight of 0 would keep
                picked.masked_fill_(absent_part[0][:, slot, None], 0.0)
            out_part.addcmul_(picked, weights_part[:, slot, None])
    return out
