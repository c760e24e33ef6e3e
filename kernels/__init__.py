"""FP8 quantisation, routing, experts and their grouped GEMMs; knows nothing of HTTP, YAML or metrics."""

from kernels.activation import Swiglu, swiglu
from kernels.backends import Backend, backend_names, resolve_backend
from kernels.combine import combine_rows
from kernels.fused_experts import fused_experts
from kernels.grouped_gemm import grouped_gemm_contiguous, grouped_gemm_masked
from kernels.order import GroupOrder, sort_by_group
from kernels.quantize import (
    Quantized,
    dequantize_blocks,
    dequantize_rows,
    gather_rows,
    quantize_blocks,
    quantize_rows,
)
from kernels.router import Routing, choose_experts

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
