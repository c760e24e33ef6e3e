"""FP8 quantisation, routing, experts and their grouped GEMMs; knows nothing of HTTP, YAML or metrics."""

from expertd.kernels.backends import Backend, backend_names, resolve_backend
from expertd.kernels.fused_experts import fused_experts
from expertd.kernels.grouped_gemm import grouped_gemm_contiguous, grouped_gemm_masked
from expertd.kernels.ops.activation import Swiglu, swiglu
from expertd.kernels.ops.permute import GroupOrder, sort_by_group
from expertd.kernels.ops.quantize import (
    Quantized,
    dequantize_blocks,
    dequantize_rows,
    gather_rows,
    quantize_blocks,
    quantize_rows,
)
from expertd.kernels.ops.router import Routing, choose_experts
from expertd.kernels.ops.unpermute import combine_rows

__all__ = [
    "Backend",
    "GroupOrder",
    "Quantized",
    "Routing",
    "Swiglu",
    "backend_names",
    "choose_experts",
    "combine_rows",
    "dequantize_blocks",
    "dequantize_rows",
    "fused_experts",
    "gather_rows",
    "grouped_gemm_contiguous",
    "grouped_gemm_masked",
    "quantize_blocks",
    "quantize_rows",
    "resolve_backend",
    "sort_by_group",
    "swiglu",
]
