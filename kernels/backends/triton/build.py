"""Compiles a variant with Triton, which needs no GPU, and keeps the binary in the kernel cache.

Binaries that are there are found without Triton: its package's metadata and the kernels' text name them.
"""

import functools
import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from expertd.cpus import cpus
from expertd.kernels.backends.triton.targets import Target
from expertd.kernels.backends.triton.variants import TritonVariant
from expertd.kernels.jit import CompileError, CompilerMissingError, cache, cache_directory
from expertd.kernels.jit.cache import DiskCache, scratch_directory
from expertd.kernels.jit.statistics import record_compilation, record_hit

_FORMAT = "2"  # of cache entries; a new format hides entries of the old one
_LENGTH_BYTES = 4
_DEVICE = Path(__file__).parent / "device"
_MISSING = "Triton: expected it to be installed (it comes with torch's CUDA build), got"


class TritonBinary(NamedTuple):
    """A compiled variant.

    shared_bytes  dynamic shared memory of a CTA
    unused        null pointers that the kernel takes behind its arguments: of memory that it does not need
    registers     of a thread
    stack_bytes   of a thread
    seconds       to compile it
    cached        whether it came from disk
    """

    cubin: bytes
    shared_bytes: int
    unused: int
    registers: int
    stack_bytes: int
    seconds: float
    cached: bool = False

    def pack(self) -> bytes:
        """Serialize for a cache."""
        about = json.dumps(self[1:-1]).encode()
        return self.cubin + about + len(about).to_bytes(_LENGTH_BYTES, "little")

    @staticmethod
    def unpack(packed: bytes) -> "TritonBinary":
        """The binary that `pack` packed, marked as cached."""
        end = len(packed) - _LENGTH_BYTES - int.from_bytes(packed[-_LENGTH_BYTES:], "little")
        about = json.loads(packed[end:-_LENGTH_BYTES])
        return TritonBinary(packed[:end], *about)._replace(cached=True)


def function_of(variant: TritonVariant) -> Any:
    """The kernel's function, as Triton has it."""
    module, name = variant.place
    return getattr(import_module(f"expertd.kernels.backends.triton.device.{module}"), name)


def source_of(variant: TritonVariant) -> str:
    """The text of the module that has the kernel."""
    return (_DEVICE / f"{variant.place[0]}.py").read_text()


def find(variant: TritonVariant, target: Target) -> TritonBinary | None:
    """The variant, if the cache or the bundle has it; never compiles. Raises CompilerMissingError."""
    entry = _cache().get(_key(variant, target))
    return None if entry is None else TritonBinary.unpack(entry)


def build(variant: TritonVariant, target: Target, directory: Path | None = None) -> TritonBinary:
    """The variant from the cache or the bundle, else compiled and stored. Thread- and process-safe.

    With `directory`, from there alone, else compiled and stored there.

    Raises CompileError if Triton rejects it, CompilerMissingError if it is needed and not installed.
    """
    entries, key = _cache() if directory is None else DiskCache(directory), _key(variant, target)
    entry = entries.get(key)
    if entry is None:
        with entries.locked(key):
            entry = entries.get(key)
            if entry is None:
                binary = compile_variant(variant, target)
                record_compilation(binary.seconds)
                entries.put(key, binary.pack())
                return binary
    record_hit()
    return TritonBinary.unpack(entry)


def build_all(
    variants: Sequence[TritonVariant], target: Target, directory: Path | None = None
) -> Iterator[tuple[TritonVariant, TritonBinary]]:
    """`build` all, by a thread for each CPU that may be used; yields each as soon as it is ready."""
    pool = ThreadPoolExecutor(cpus().count, thread_name_prefix="triton")
    try:
        jobs = {pool.submit(build, variant, target, directory): variant for variant in variants}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
    finally:
        pool.shutdown(cancel_futures=True)


def compile_variant(variant: TritonVariant, target: Target) -> TritonBinary:
    """Compile, without the cache. Raises CompileError with Triton's message, CompilerMissingError."""
    start = time.perf_counter()
    compiled = run_compiler(variant, target)
    seconds = time.perf_counter() - start
    entry = re.search(rf"\.entry {variant.place[1]}\((.*?)\)", compiled.asm["ptx"], re.S)
    assert entry is not None
    unused = entry[1].count(".param") - len(variant.types)
    (cubin,) = (path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    registers, stack_bytes = _usage(cubin)
    return TritonBinary(
        compiled.asm["cubin"], compiled.metadata.shared, unused, registers, stack_bytes, seconds
    )


def run_compiler(variant: TritonVariant, target: Target) -> Any:
    """What Triton makes of a variant, with its intermediate code. Raises as `compile_variant`."""
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton.knobs.cache.dir = scratch_directory().name  # its own cache, without which it does not compile
    triton.knobs.compilation.disable_line_info = True  # which would be two thirds of a binary
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


def _cache() -> DiskCache:
    return DiskCache(cache_directory(), cache.BUNDLE)


def _key(variant: TritonVariant, target: Target) -> str:
    parts = (_FORMAT, _version(), _device_text(), repr(variant), repr(target))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _version() -> str:
    """The version of Triton's package, whose metadata an image keeps."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError as error:
        raise CompilerMissingError(f"{_MISSING}: {error}") from error


@functools.cache
def _device_text() -> str:
    """The text of all kernels, as they call each other's functions."""
    return "\0".join(path.read_text() for path in sorted(_DEVICE.glob("*.py")))


def _triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise CompilerMissingError(f"{_MISSING}: {error}") from error
    return triton


def _usage(cubin: str) -> tuple[int, int]:
    """(registers, bytes of the stack) of a thread of the only kernel in a file."""
    tool = Path(_triton().__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
