"""FP8 quantisation and grouped GEMMs for expert layers; knows nothing of HTTP, YAML or metrics."""

from kernels.activation import swiglu
from kernels.backends import Backend, backend_names, resolve_backend
from kernels.chunks import row_chunks
from kernels.grouped_ffn import grouped_ffn
from kernels.grouped_gemm import grouped_gemm_contiguous, grouped_gemm_masked
from kernels.quantize import (
    Quantized,
    dequantize_blocks,
    dequantize_rows,
    gather_rows,
    quantize_blocks,
    quantize_rows,
)

__all__ = [
    "Backend",
    "Quantized",
    "backend_names",
    "dequantize_blocks",
    "dequantize_rows",
    "gather_rows",
    "grouped_ffn",
    "grouped_gemm_contiguous",
    "grouped_gemm_masked",
    "quantize_blocks",
    "quantize_rows",
    "resolve_backend",
    "row_chunks",
    "swiglu",
]
