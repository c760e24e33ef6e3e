"""The limits of kernels and layers, each defined once."""

SCALE_BLOCK = 128
"""Columns of K per scale; in a weight, rows and columns of a block."""
MAX_GROUPS = 1024
"""Groups of a grouped GEMM: the local and shared experts."""
MAX_EXPERTS = 1024
"""Experts that a router chooses among."""
