"""Compiles a source: NVRTC through cuda.core, without a cache. Needs neither a GPU nor a driver."""

import io
import json
import logging
import re
import threading
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from expertd.kernels.jit.source import Source

ARCHITECTURE = "sm_90a"
_OPTIONS: dict[str, Any] = {
    "arch": ARCHITECTURE,
    "std": "c++17",
    "lineinfo": True,  # lets profilers show the source
    "ptxas_options": ["-v"],
    "no_cache": True,  # a binary from NVRTC's own cache comes without the resource report
}
_LENGTH_BYTES = 4
_importing = threading.Lock()  # threads importing cuda.core concurrently can see it half initialized

logger = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """NVRTC rejected a source; the message has the options and the compiler's log."""


class CompilerMissingError(RuntimeError):
    """NVRTC or cuda.core is missing; the message says which."""


@dataclass(frozen=True)
class ResourceUsage:
    """A kernel's resources as reported by ptxas; bytes are per thread."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class Binary:
    """A compiled variant. `cached`: whether it came from disk; `seconds`: its compile time."""

    cubin: bytes
    usage: ResourceUsage
    log: str
    seconds: float
    cached: bool

    def pack(self) -> bytes:
        """Serialize for a cache. The cubin comes first, since ELF tools ignore trailing bytes."""
        about = {"usage": asdict(self.usage), "log": self.log, "seconds": self.seconds}
        tail = json.dumps(about).encode()
        return self.cubin + tail + len(tail).to_bytes(_LENGTH_BYTES, "little")

    @staticmethod
    def unpack(packed: bytes) -> "Binary":
        """The binary that `pack` packed, marked as cached."""
        end = len(packed) - _LENGTH_BYTES - int.from_bytes(packed[-_LENGTH_BYTES:], "little")
        about = json.loads(packed[end:-_LENGTH_BYTES])
        usage = ResourceUsage(**about["usage"])
        return Binary(packed[:end], usage, about["log"], about["seconds"], cached=True)


def compiler_version() -> str:
    """The versions of NVRTC, its package and cuda.core, and the options: a binary's inputs beside its source.

    Without the package, the size and time of NVRTC's library: a toolkit's patch releases have one version.

    Raises CompilerMissingError if the cuda extra is not fully installed.
    """
    core, nvrtc = _cuda()
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilerMissingError(f"NVRTC version: expected a number, got {status.name}")
    return f"nvrtc {major}.{minor} package {_package()}, cuda.core {core.__version__}, {_OPTIONS}"


def compile_source(source: Source, text: str | None = None) -> Binary:
    """Compile a variant without the cache. `text` is the source's text if already read. Thread-safe.

    Raises CompileError (with options and log) if the source does not compile.
    """
    core, _ = _cuda()
    text = source.text() if text is None else text
    # Named, so that cuda.core does not put a temporary file name into the line information.
    options = core.ProgramOptions(name=f"{source.name}.cu", **_OPTIONS)
    written = io.StringIO()
    start = time.perf_counter()
    try:
        cubin = bytes(core.Program(text, "c++", options).compile("cubin", logs=written).code)
    except Exception as error:  # cuda.core has no public class for NVRTC's errors
        raise CompileError(_refusal(source, f"{error}\n{written.getvalue()}")) from error
    seconds = time.perf_counter() - start
    log = written.getvalue()
    for line in log.splitlines():
        if "warning" in line.lower():
            logger.warning("%s: %s", source.name, line.strip())
    return Binary(cubin, _usage(source, log), log, seconds, cached=False)


def to_ptx(source: Source) -> str:
    """The variant's PTX, for people to read. Raises CompileError."""
    _, nvrtc = _cuda()  # cuda.core makes PTX only if there is a driver
    options = [f"-arch={ARCHITECTURE}", f"-std={_OPTIONS['std']}", "-lineinfo"]
    _, program = nvrtc.nvrtcCreateProgram(source.text().encode(), source.name.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(_refusal(source, f"{status.name}\n{_text(log)}"))
        ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
        nvrtc.nvrtcGetPTX(program, ptx)
        return _text(ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _cuda() -> tuple[Any, Any]:
    """cuda.core and NVRTC's bindings with the library loaded, or CompilerMissingError."""
    with _importing:
        try:
            import cuda.core
            from cuda.bindings import nvrtc

            nvrtc.nvrtcVersion()
        except (ImportError, RuntimeError) as error:  # the package is missing, or the library that it loads
            raise CompilerMissingError(
                f"CUDA compiler: expected it to be installed (pip install 'expertd[cuda]'), got: {error}"
            ) from error
        return cuda.core, nvrtc


def _package() -> str:
    """The version of NVRTC's package; without it, what tells the library from others."""
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = load_nvidia_dynamic_lib("nvrtc").abs_path
        file = None if library is None else Path(library).stat()
        return "none" if file is None else f"none, {file.st_size} bytes of {file.st_mtime_ns}"


def _text(buffer: bytearray) -> str:
    return bytes(buffer).rstrip(b"\0").decode()


def _refusal(source: Source, reason: str) -> str:
    defines = " ".join(f"{name}={value}" for name, value in source.defines)
    return f"{source.name}: expected {source.file} to compile with {defines}, {_OPTIONS}; got:\n{reason}"


def _usage(source: Source, log: str) -> ResourceUsage:
    def largest(pattern: str) -> int:
        numbers = [int(number) for number in re.findall(pattern, log)]
        if not numbers:
            raise CompileError(f"{source.name}: expected ptxas to report /{pattern}/, got:\n{log}")
        return max(numbers)  # a function that was not inlined has its own line

    return ResourceUsage(
        registers=largest(r"Used (\d+) registers"),
        stack_bytes=largest(r"(\d+) bytes stack frame"),
        spill_store_bytes=largest(r"(\d+) bytes spill stores"),
        spill_load_bytes=largest(r"(\d+) bytes spill loads"),
    )
