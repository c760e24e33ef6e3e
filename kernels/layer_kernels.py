"""The kernels of a layer around its GEMMs: the closed list, for the JIT."""

import torch

from kernels.jit import Source


def _source(file: str, **defines: object) -> Source:
    name = "_".join([file, *(str(value).lower() for value in defines.values())])
    return Source(name, f"{file}.cu", file, tuple((key, str(value)) for key, value in defines.items()))


SORT = _source("sort_rows")
QUANTIZE = {
    torch.bfloat16: _source("quantize_rows", DATATYPE="BF16"),
    torch.float16: _source("quantize_rows", DATATYPE="FP16"),
    torch.float32: _source("quantize_rows", DATATYPE="FP32"),
}
COMBINE = _source("combine_rows")
ROUTE = {8: _source("route_tokens", PER_LANE=8), 32: _source("route_tokens", PER_LANE=32)}
"""By the experts a lane looks at: up to 256 and up to 1024 of them."""

SOURCES = (SORT, *QUANTIZE.values(), COMBINE, *ROUTE.values())
