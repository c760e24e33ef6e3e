"""Run-time compilation of the CUDA sources in kernels/csrc: files, options and a cache, but no GEMM."""

from expertd.kernels.jit.build import build, build_all, find
from expertd.kernels.jit.cache import BUNDLE, CACHE_DIR_VARIABLE, cache_directory, check_writable
from expertd.kernels.jit.compiler import (
    ARCHITECTURE,
    Binary,
    CompileError,
    CompilerMissingError,
    ResourceUsage,
    compile_source,
    to_ptx,
)
from expertd.kernels.jit.source import Source, Variant
from expertd.kernels.jit.statistics import JitStats, stats

__all__ = [
    "ARCHITECTURE",
    "BUNDLE",
    "CACHE_DIR_VARIABLE",
    "Binary",
    "CompileError",
    "CompilerMissingError",
    "JitStats",
    "ResourceUsage",
    "Source",
    "Variant",
    "build",
    "build_all",
    "cache_directory",
    "check_writable",
    "compile_source",
    "find",
    "stats",
    "to_ptx",
]
