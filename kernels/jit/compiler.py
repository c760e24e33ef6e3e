"""Source and options to a loaded-ready binary: NVRTC through cuda.core, behind the disk cache."""

import hashlib
import io
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.jit import statistics
from kernels.jit.cache import DiskCache, cache_directory

CSRC = Path(__file__).parent.parent / "csrc"
ARCHITECTURE = "sm_90a"
_STANDARD = "c++17"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_LENGTH_BYTES = 4


class CompileError(RuntimeError):
    """NVRTC refused a source; the message has the options and the compiler's log."""


@dataclass(frozen=True)
class ResourceUsage:
    """What ptxas reports of a kernel; bytes are a thread's."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class Source:
    """A file of kernels/csrc with its macro definitions: one variant of a kernel."""

    name: str
    file: str
    entry: str
    defines: tuple[tuple[str, str], ...]

    def files(self) -> dict[str, str]:
        """The file and every header it includes, recursively, by name."""
        found: dict[str, str] = {}
        waiting = [self.file]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = (CSRC / name).read_text()
                waiting += _INCLUDE.findall(found[name])
        return found

    def text(self) -> str:
        """What the compiler is given, definitions first."""
        lines = [f"#define {name} {value}" for name, value in self.defines]
        return "\n".join([*lines, f'#include "{self.file}"', ""])


@dataclass(frozen=True)
class Binary:
    """A compiled variant; `cached` tells whether it was found on disk, `seconds` what compiling took then."""

    cubin: bytes
    usage: ResourceUsage
    log: str
    seconds: float
    cached: bool


def cache_key(source: Source) -> str:
    """Changes with the source, its headers, the definitions, the options, the compiler and the architecture."""
    from cuda.bindings import nvrtc

    parts = [ARCHITECTURE, _STANDARD, str(nvrtc.nvrtcVersion()[1:]), source.entry, source.text()]
    parts += [f"{name}\n{text}" for name, text in sorted(source.files().items())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find(source: Source) -> Binary | None:
    """The variant if the disk cache has it whole; compiles nothing."""
    entry = DiskCache(cache_directory()).get(cache_key(source))
    return _unpack(entry) if entry is not None else None


def build(source: Source) -> Binary:
    """The variant from the disk cache, else compiled and put there. Safe in several threads and processes.

    Raises CompileError with options and log when the compiler refuses.
    """
    cache, key = DiskCache(cache_directory()), cache_key(source)
    with cache.locked(key):
        entry = cache.get(key)
        if entry is not None:
            statistics.record_hit()
            return _unpack(entry)
        binary = compile_source(source)
        statistics.record_compilation(binary.seconds)
        cache.put(key, _pack(binary))
        return binary


def compile_source(source: Source) -> Binary:
    """Compile a variant for sm_90a whatever the cache holds; needs neither a GPU nor a driver."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=ARCHITECTURE, std=_STANDARD, include_path=str(CSRC), ptxas_options=["-v"], lineinfo=True
    )
    log = io.StringIO()
    start = time.perf_counter()
    try:
        cubin = bytes(Program(source.text(), "c++", options).compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core raises NVRTC's and nvJitLink's own kinds, the log in their text
        raise CompileError(
            f"{source.name}: {source.defines} for {ARCHITECTURE}\n{error}\n{log.getvalue()}"
        ) from error
    return Binary(cubin, _usage(log.getvalue()), log.getvalue(), time.perf_counter() - start, cached=False)


def to_ptx(source: Source) -> str:
    """The variant's PTX, for reading."""
    from cuda.bindings import nvrtc

    options = [f"-arch={ARCHITECTURE.replace('sm', 'compute')}", f"-std={_STANDARD}", f"-I{CSRC}"]
    _, program = nvrtc.nvrtcCreateProgram(source.text().encode(), source.name.encode(), 0, None, None)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{source.name}: {source.defines} for {ARCHITECTURE}: {status.name}")
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    return bytes(ptx).rstrip(b"\0").decode()


def _usage(log: str) -> ResourceUsage:
    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        if match is None:
            raise CompileError(f"expected ptxas to report /{pattern}/, got:\n{log}")
        return int(match[1])

    return ResourceUsage(
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
    )


def _pack(binary: Binary) -> bytes:
    # The cubin comes first: tools that read ELF ignore what follows it.
    about = {"usage": asdict(binary.usage), "log": binary.log, "seconds": binary.seconds}
    tail = json.dumps(about).encode()
    return binary.cubin + tail + len(tail).to_bytes(_LENGTH_BYTES, "little")


def _unpack(entry: bytes) -> Binary:
    length = int.from_bytes(entry[-_LENGTH_BYTES:], "little")
    end = len(entry) - _LENGTH_BYTES - length
    about = json.loads(entry[end:-_LENGTH_BYTES])
    return Binary(entry[:end], ResourceUsage(**about["usage"]), about["log"], about["seconds"], cached=True)
