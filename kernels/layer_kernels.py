"""The kernels of a layer around its GEMMs: the closed list, for the JIT."""

import torch

from kernels.jit import Source


def _source(file: str, **defines: object) -> Source:
    name = "_".join([file, *(str(value).lower() for value in defines.values())])
    return Source(name, f"{file}.cu", file, tuple((key, str(value)) for key, value in defines.items()))


MAX_GROUPS = 1024
MAX_EXPERTS = 1024  # that a token is routed among
THREADS = {"sort_rows": 1024, "quantize_rows": 128, "combine_rows": 256, "route_tokens": 32}
"""Of a CTA, by entry."""
_FLOATS = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}

SORT = _source("sort_rows")
QUANTIZE = {dtype: _source("quantize_rows", DATATYPE=name) for dtype, name in _FLOATS.items()}
COMBINE = {dtype: _source("combine_rows", DATATYPE=name) for dtype, name in _FLOATS.items()}
"""By the tokens' dtype, and by the output's."""
ROUTE = _source("route_tokens")

SOURCES = (SORT, *QUANTIZE.values(), *COMBINE.values(), ROUTE)


def shared_bytes(source: Source, num_groups: int) -> int:
    """Dynamic shared memory of a CTA."""
    return 33 * num_groups * 4 if source is SORT else 0
