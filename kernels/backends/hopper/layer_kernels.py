"""The kernels of a layer around its GEMMs: the closed list, for the JIT."""

import torch

from expertd.kernels.jit import Source


def _source(file: str, variant: str = "", **defines: object) -> Source:
    name = f"{file}_{variant}" if variant else file
    return Source(name, f"{file}.cu", file, tuple((key, str(value)) for key, value in defines.items()))


MAX_GROUPS = 1024
MAX_EXPERTS = 1024  # that a token is routed among
THREADS = {
    "compute_permutation": 1024,
    "quantize_permute": 128,
    "unpermute_rows": 256,
    "router_logits": 128,
    "route_tokens": 128,
}
"""Of a CTA, by entry."""
_FLOATS = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}

FEW_PAIRS = 128
"""That are sorted by comparing each with all."""
SORT = _source("compute_permutation", FEW_PAIRS=FEW_PAIRS)
QUANTIZE = {
    dtype: _source("quantize_permute", name.lower(), DATATYPE=name) for dtype, name in _FLOATS.items()
}
COMBINE = {dtype: _source("unpermute_rows", name.lower(), DATATYPE=name) for dtype, name in _FLOATS.items()}
"""By the tokens' dtype, and by the output's."""
LOGITS_TOKENS, LOGITS_EXPERTS = 64, 128
"""Of a CTA, and its boxes' rows."""
LOGITS_SUMS, LOGITS_COLUMNS = 4, 256
"""Sums of a part of K, and columns of each."""
_LOGITS_BYTES = LOGITS_COLUMNS // 64 * ((LOGITS_TOKENS + LOGITS_EXPERTS) * 128 + 8)
LOGITS = _source(
    "router_logits", TOKENS=LOGITS_TOKENS, EXPERTS=LOGITS_EXPERTS, SUM_COLUMNS=LOGITS_COLUMNS,
    STORAGE_BYTES=_LOGITS_BYTES,
)  # fmt: skip
ROUTE = _source("route_tokens", SUMS=LOGITS_SUMS)

SOURCES = (SORT, *QUANTIZE.values(), *COMBINE.values(), LOGITS, ROUTE)


def shared_bytes(source: Source, num_groups: int) -> int:
    """Dynamic shared memory of a CTA; for routing, groups are all experts."""
    if source is SORT:
        return 33 * num_groups * 4
    if source is ROUTE:
        return 3 * (num_groups + num_groups % 2) * 4
    return _LOGITS_BYTES if source is LOGITS else 0
