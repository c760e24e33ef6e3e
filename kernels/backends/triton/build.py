"""Compiles a variant with Triton, which needs no GPU, and keeps the binary in the kernel cache."""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from typing import Any, NamedTuple

from expertd.cpus import cpus
from expertd.kernels.backends.triton.targets import Target
from expertd.kernels.backends.triton.variants import Variant
from expertd.kernels.jit import BUNDLE, CompileError, cache_directory
from expertd.kernels.jit.cache import DiskCache, scratch_directory
from expertd.kernels.jit.statistics import record_compilation, record_hit

_FORMAT = "1"  # of cache entries; a new format hides entries of the old one
_LENGTH_BYTES = 4


class Binary(NamedTuple):
    """A compiled variant.

    shared_bytes  dynamic shared memory of a CTA
    unused        null pointers that the kernel takes behind its arguments: of memory that it does not need
    """

    cubin: bytes
    shared_bytes: int
    unused: int

    def pack(self) -> bytes:
        """Serialize for a cache."""
        about = json.dumps([self.shared_bytes, self.unused]).encode()
        return self.cubin + about + len(about).to_bytes(_LENGTH_BYTES, "little")

    @staticmethod
    def unpack(packed: bytes) -> "Binary":
        """The binary that `pack` packed."""
        end = len(packed) - _LENGTH_BYTES - int.from_bytes(packed[-_LENGTH_BYTES:], "little")
        return Binary(packed[:end], *json.loads(packed[end:-_LENGTH_BYTES]))


def function_of(variant: Variant) -> Any:
    """The kernel's function, as Triton has it."""
    module, name = variant.place
    return getattr(import_module(f"expertd.kernels.backends.triton.device.{module}"), name)


def build(variant: Variant, target: Target) -> Binary:
    """The variant from the cache or the bundle, else compiled and stored. Thread- and process-safe.

    Raises CompileError if Triton rejects it.
    """
    entries, key = DiskCache(cache_directory(), BUNDLE), _key(variant, target)
    entry = entries.get(key)
    if entry is None:
        with entries.locked(key):
            entry = entries.get(key)
            if entry is None:
                start = time.perf_counter()
                binary = compile_variant(variant, target)
                record_compilation(time.perf_counter() - start)
                entries.put(key, binary.pack())
                return binary
    record_hit()
    return Binary.unpack(entry)


def build_all(variants: Sequence[Variant], target: Target) -> Iterator[tuple[Variant, Binary]]:
    """`build` all, by a thread for each CPU that may be used; yields each as soon as it is ready."""
    pool = ThreadPoolExecutor(cpus().count, thread_name_prefix="triton")
    try:
        jobs = {pool.submit(build, variant, target): variant for variant in variants}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
    finally:
        pool.shutdown(cancel_futures=True)


def compile_variant(variant: Variant, target: Target) -> Binary:
    """Compile, without the cache. Raises CompileError with Triton's message."""
    compiled = run_compiler(variant, target)
    entry = re.search(rf"\.entry {variant.place[1]}\((.*?)\)", compiled.asm["ptx"], re.S)
    assert entry is not None
    unused = entry[1].count(".param") - len(variant.types)
    return Binary(compiled.asm["cubin"], compiled.metadata.shared, unused)


def run_compiler(variant: Variant, target: Target) -> Any:
    """What Triton makes of a variant, with its intermediate code. Raises CompileError."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton.knobs.cache.dir = scratch_directory().name  # its own cache, without which it does not compile
    function, types, constants = function_of(variant), dict(variant.types), dict(variant.constants)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (function.arg_names.index(name),): [["tt.divisibility", multiple]]
        for name, multiple in variant.multiples
    }
    # Kernels say where a product and a sum are rounded once, so that all variants of a target agree.
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": False}
    try:
        return triton.compile(
            ASTSource(function, signature, constants, attributes),
            target=GPUTarget("cuda", target.capability, 32),
            options=options,
        )
    except Exception as error:  # Triton's own, of its passes, and of the assembler
        raise CompileError(f"{variant.name} for {target.capability}: {error}") from error


def _key(variant: Variant, target: Target) -> str:
    import triton

    parts = (_FORMAT, triton.__version__, function_of(variant).cache_key, repr(variant), repr(target))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
