"""The limits of kernels and layers, each defined once."""

SCALE_BLOCK = 128
"""Columns of K per scale; in a weight, rows and columns of a block."""
COLUMN_STEP = 32
"""Columns of weights of four bits are a multiple of it: rows then begin at multiples of 16 bytes."""
HIDDEN_STEP = 16
"""A hidden size is a multiple of it, for every backend; one may want more, see `Capabilities`."""
MAX_GROUPS = 1024
"""Groups of a grouped GEMM: the local and shared experts."""
MAX_EXPERTS = 1024
"""Experts that a router chooses among."""
MAX_RANKS = 8
"""GPUs of one host that share a layer."""
MAX_RANK_PAIRS = 2**19 - 2
"""(token, slot) pairs of each GPU in a step, if several share a layer: a pair's number has 19 bits."""
