"""Turns variants into binaries: from the disk cache, else compiled once and stored there."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from expertd.cpus import cpus
from expertd.kernels.jit import cache, statistics
from expertd.kernels.jit.cache import DiskCache, cache_directory
from expertd.kernels.jit.compiler import Binary, compile_source, compiler_version
from expertd.kernels.jit.source import Source

_FORMAT = "1"  # of cache entries; a new format hides entries of the old one


def cache_key(source: Source) -> str:
    """A hash of the source, its headers, definitions and options, the compiler and the architecture."""
    return _key(source.text())


def find(source: Source) -> Binary | None:
    """The variant, if the disk cache or the bundle has it; never compiles. Raises CompilerMissingError."""
    entry = _cache().get(cache_key(source))
    return Binary.unpack(entry) if entry is not None else None


def build(source: Source, directory: Path | None = None) -> Binary:
    """The variant from the disk cache or the bundle, else compiled and stored. Thread- and process-safe.

    With `directory`, from there alone, else compiled and stored there.

    Raises CompileError (with options and log) if the source does not compile, CompilerMissingError if there
    is no compiler.
    """
    text = source.text()  # read once, so that exactly what is hashed is compiled
    entries, key = _cache() if directory is None else DiskCache(directory), _key(text)
    entry = entries.get(key)
    if entry is None:
        with entries.locked(key):
            entry = entries.get(key)
            if entry is None:
                binary = compile_source(source, text)
                statistics.record_compilation(binary.seconds)
                entries.put(key, binary.pack())
                return binary
    statistics.record_hit()
    return Binary.unpack(entry)


def build_all(sources: Sequence[Source], directory: Path | None = None) -> Iterator[tuple[Source, Binary]]:
    """`build` all in parallel, by a thread for each CPU that may be used; yields each as soon as it is ready.

    An error, or closing the iterator early, cancels the builds that have not begun.
    """
    pool = ThreadPoolExecutor(cpus().count, thread_name_prefix="jit")
    try:
        jobs = {pool.submit(build, source, directory): source for source in sources}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _cache() -> DiskCache:
    return DiskCache(cache_directory(), cache.BUNDLE)


def _key(text: str) -> str:
    return hashlib.sha256("\0".join([_FORMAT, compiler_version(), text]).encode()).hexdigest()
