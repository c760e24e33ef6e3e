"""The limits of kernels and layers, each written once."""

SCALE_BLOCK = 128
"""Columns of K that share a scale; of a weight, rows and columns."""
MAX_GROUPS = 1024
"""Groups of a grouped GEMM: the experts that are held here, shared ones included."""
MAX_EXPERTS = 1024
"""Experts that a token is routed among."""
