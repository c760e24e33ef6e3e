"""FP8 quantization, routing, experts and their grouped GEMMs; independent of HTTP, YAML and metrics."""

from expertd.kernels.backends import Backend, backend_names, resolve_backend
from expertd.kernels.fused_experts import fused_experts, fused_experts_in_parts
from expertd.kernels.grouped_gemm import grouped_gemm_contiguous, grouped_gemm_masked
from expertd.kernels.ops.activation import Activation, OtherGlu, Swiglu, swiglu
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import FourBits, Weights, decode
from expertd.kernels.ops.parts import ExpertPart, GroupTable, PartsOfRank
from expertd.kernels.ops.permute import Permutation, compute_permutation, permute_rows
from expertd.kernels.ops.quantize import (
    HiddenStates,
    Quantized,
    as_floats,
    dequantize_blocks,
    dequantize_rows,
    expand_rows,
    quantize_blocks,
    quantize_rows,
    values_of,
)
from expertd.kernels.ops.router import choose_experts
from expertd.kernels.ops.unpermute import unpermute_rows
from expertd.kernels.overlap import Overlap, OverlapMode, overlaps
from expertd.kernels.rank_memory import RankMemory, RankTokens
from expertd.kernels.stages import Stages
from expertd.routing import Routing
from expertd.weight_format import WeightFormat

__all__ = [
    "Activation",
    "Backend",
    "ExpertBiases",
    "ExpertPart",
    "FourBits",
    "GroupTable",
    "HiddenStates",
    "OtherGlu",
    "Overlap",
    "OverlapMode",
    "PartsOfRank",
    "Permutation",
    "Quantized",
    "RankMemory",
    "RankTokens",
    "Routing",
    "Stages",
    "Swiglu",
    "WeightFormat",
    "Weights",
    "as_floats",
    "backend_names",
    "choose_experts",
    "compute_permutation",
    "decode",
    "dequantize_blocks",
    "dequantize_rows",
    "expand_rows",
    "fused_experts",
    "fused_experts_in_parts",
    "grouped_gemm_contiguous",
    "grouped_gemm_masked",
    "overlaps",
    "permute_rows",
    "quantize_blocks",
    "quantize_rows",
    "resolve_backend",
    "swiglu",
    "unpermute_rows",
    "values_of",
]
