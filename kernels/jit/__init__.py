"""Run-time compilation of the CUDA sources in kernels/csrc: knows files, options and a cache, but no GEMM."""

from kernels.jit.cache import CACHE_DIR_VARIABLE, cache_directory
from kernels.jit.compiler import Binary, CompileError, ResourceUsage, Source, build, to_ptx
from kernels.jit.statistics import JitStats, stats

__all__ = [
    "CACHE_DIR_VARIABLE",
    "Binary",
    "CompileError",
    "JitStats",
    "ResourceUsage",
    "Source",
    "build",
    "cache_directory",
    "stats",
    "to_ptx",
]
