"""`expertd kernels`: lists the kernel variants and their resources, compiles them, or dumps one of them."""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.backends import BACKENDS
from expertd.service.util.files import temporary_folder, write_whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from expertd.kernels.backends.listing import KernelList

FORMATS = ("source", "ptx", "sass", "cubin")
_NUM_GROUPS = 256  # for the shared memory listed, which includes a table with an entry per group


class KernelsCommandError(Exception):
    """Invalid arguments or a missing tool; the text is one sentence."""


@dataclass(frozen=True)
class VariantRow:
    """A variant and, if it is compiled, its resources; stack and spills are bytes per thread.

    Triton says neither how much is spilled nor, of a kernel that is not compiled, its shared memory.
    """

    name: str
    cached: bool
    shared_bytes: int | None
    registers: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    compile_seconds: float | None


@dataclass(frozen=True)
class BuildReport:
    """Wall seconds to build all variants, and then to fetch all of them from the cache."""

    compiled: int
    seconds: float
    from_cache: int
    from_cache_seconds: float


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "kernels",
        help="list, compile or dump the GPU kernels' variants; needs no GPU",
        description="List the GPU kernels' variants. Compiles only with --build or --dump, and needs no GPU.",
    )
    parser.add_argument(
        "--build", action="store_true", help="compile what the cache lacks, and print the time taken"
    )
    parser.add_argument(
        "--bundle",
        action="store_true",
        help="for --build: store them with the installed package, where every start finds them",
    )
    compiling = [name for name, can in BACKENDS.items() if can.compiles]
    parser.add_argument(
        "--backend",
        choices=compiling,
        default=compiling[0],
        help=f"whose kernels (default: {compiling[0]})",
    )
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        help="the architecture, such as sm_89 (default: this machine's GPU's, else the backend's first)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--dump", metavar="NAME", help="print one variant instead of the list")
    parser.add_argument("--format", choices=FORMATS, help="for --dump (default: source)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="for --dump (default: stdout)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return 0, 1 if a kernel does not compile, or 2 for invalid arguments."""
    # Imported here because torch takes seconds to import, and `expertd --version` must be fast.
    from expertd.kernels.jit import CompileError

    try:
        _check(arguments)
        kernels = _kernels(arguments.backend, arguments.arch)
        if arguments.dump is not None:
            _write(_dump(kernels, arguments.dump, arguments.format or "source"), arguments.output)
        else:
            _list(kernels, arguments)
    except BrokenPipeError:
        raise  # whoever reads the output has ended, which is no error
    except CompileError as error:
        print(f"expertd kernels: {error}", file=sys.stderr)
        return 1
    except (KernelsCommandError, OSError, RuntimeError) as error:
        print(f"expertd kernels: {error}", file=sys.stderr)
        return 2
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.bundle and not arguments.build:
        raise KernelsCommandError("bundle: expected --build with it, got none")
    if arguments.dump is None:
        for name in ("output", "format"):
            if getattr(arguments, name):
                raise KernelsCommandError(f"{name}: expected --dump with it, got none")


def _kernels(backend: str, architecture: str | None) -> "KernelList":
    from expertd.kernels.backends import architectures, kernel_list

    known = architectures(backend)
    if architecture is not None and architecture not in known:
        raise KernelsCommandError(f"arch: expected {' or '.join(known)}, got {architecture!r}")
    return kernel_list(backend, architecture or known[0])


def _list(kernels: "KernelList", arguments: argparse.Namespace) -> None:
    from expertd.kernels.jit import BUNDLE, cache_directory

    report = _build_all(kernels, BUNDLE if arguments.bundle else None) if arguments.build else None
    rows = [_row(kernels, name) for name in kernels.names]
    if arguments.json:
        about = {
            "cache_directory": str(cache_directory()),
            "shared_bytes_groups": _NUM_GROUPS,
            "variants": [asdict(row) for row in rows],
            "build": asdict(report) if report else None,
        }
        print(json.dumps(about, indent=2))
        return
    _print_table(rows)
    print(f"cache: {cache_directory()}; shared memory as with {_NUM_GROUPS} groups")
    if report is not None:
        print(
            f"built all in {report.seconds:.3f} s ({report.compiled} compiled), "
            f"then {report.from_cache} of {len(rows)} from the cache in {report.from_cache_seconds:.3f} s"
        )


def _build_all(kernels: "KernelList", directory: Path | None) -> BuildReport:
    """With `directory`, leaves nothing there but binaries. Raises KernelsCommandError if it lacks any."""
    from expertd.kernels.jit import cache_directory, check_writable
    from expertd.service.util.logs import progress_bar

    names = kernels.names
    if directory is None and any(kernels.find(name) is None for name in names):
        check_writable(cache_directory())
    start = time.perf_counter()
    compiled = 0
    with progress_bar("kernels", len(names), "kernel") as advance:
        for name, kernel in kernels.build_all(directory):
            compiled += not kernel.cached
            advance(1, name)
    middle = time.perf_counter()
    from_cache = sum(kernel.cached for _, kernel in kernels.build_all(directory))
    if from_cache < len(names):
        target = f"cache: expected to write to {cache_directory()}"
        if directory is not None:
            target = f"bundle: expected to write to {directory}"
        raise KernelsCommandError(f"{target}, which was refused")
    if directory is not None:
        for lock in directory.glob("*.lock"):
            lock.unlink()
    return BuildReport(compiled, middle - start, from_cache, time.perf_counter() - middle)


def _row(kernels: "KernelList", name: str) -> VariantRow:
    found, shared_bytes = kernels.find(name), kernels.shared_bytes(name, _NUM_GROUPS)
    if found is None:
        return VariantRow(name, False, shared_bytes, None, None, None, None)
    return VariantRow(
        name, True, shared_bytes, found.registers, found.stack_bytes, found.spill_bytes, found.seconds
    )


def _print_table(rows: list[VariantRow]) -> None:
    width = max(len(row.name) for row in rows)
    heads = f"{'registers':>9}  {'shared':>7}  {'stack':>5}  {'spills':>6}  {'compile':>8}  state"
    print(f"{'variant':{width}}  {heads}")
    for row in rows:
        seconds = "-" if row.compile_seconds is None else f"{row.compile_seconds:.2f} s"
        print(
            f"{row.name:{width}}  {_or_dash(row.registers):>9}  {_or_dash(row.shared_bytes):>7}  "
            f"{_or_dash(row.stack_bytes):>5}  {_or_dash(row.spill_bytes):>6}  {seconds:>8}  "
            f"{'cached' if row.cached else 'not compiled'}"
        )


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _dump(kernels: "KernelList", name: str, form: str) -> bytes:
    if name not in kernels.names:
        raise KernelsCommandError(f"dump: expected one of {', '.join(kernels.names)}, got {name!r}")
    if form == "source":
        return kernels.source(name).encode()
    if form == "ptx":
        return kernels.ptx(name).encode()
    if form == "sass":
        return _disassemble(kernels.build(name).cubin)
    return kernels.build(name).cubin


def _disassemble(cubin: bytes) -> bytes:
    tool = _disassembler()
    with temporary_folder("--format sass") as folder:
        (file := folder / "kernel.cubin").write_bytes(cubin)
        result = subprocess.run([tool, "-c", file], capture_output=True, check=False)
    if result.returncode != 0:
        raise KernelsCommandError(f"{tool} failed: {result.stderr.decode(errors='replace').strip()}")
    return result.stdout


def _disassembler() -> str:
    found = shutil.which("nvdisasm")
    if found is None:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility("nvdisasm")
    if found is None:
        raise KernelsCommandError(
            "nvdisasm: expected on PATH or installed (pip install 'expertd[cuda]'), got neither"
        )
    return str(found)


def _write(content: bytes, output: Path | None) -> None:
    if output is not None:
        write_whole(output, content, "output")
        return
    if sys.stdout.isatty() and b"\0" in content:
        raise KernelsCommandError("output: expected a file for a cubin (-o FILE), got a terminal")
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
