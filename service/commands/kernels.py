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

from expertd.service.util.files import temporary_folder, write_whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from expertd.kernels.jit import Binary

FORMATS = ("source", "ptx", "sass", "cubin")
_NUM_GROUPS = 256  # for the shared memory listed, which includes a table with an entry per group


class KernelsCommandError(Exception):
    """Invalid arguments or a missing tool; the text is one sentence."""


@dataclass(frozen=True)
class VariantRow:
    """A variant and, if it is compiled, its resources; stack and spills are bytes per thread."""

    name: str
    cached: bool
    shared_bytes: int
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
    parser.add_argument("--arch", metavar="ARCH", help="for --build: the architecture, sm_90a (the default)")
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
        if arguments.dump is not None:
            _write(_dump(arguments.dump, arguments.format or "source"), arguments.output)
        else:
            _list(arguments)
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
    from expertd.kernels.jit import ARCHITECTURE

    if arguments.arch not in (None, ARCHITECTURE):
        raise KernelsCommandError(f"arch: expected {ARCHITECTURE}, got {arguments.arch!r}")
    if not arguments.build:
        for name in ("bundle", "arch"):
            if getattr(arguments, name):
                raise KernelsCommandError(f"{name}: expected --build with it, got none")
    if arguments.dump is None:
        for name in ("output", "format"):
            if getattr(arguments, name):
                raise KernelsCommandError(f"{name}: expected --dump with it, got none")


def _list(arguments: argparse.Namespace) -> None:
    from expertd.kernels.backends import jit_variants
    from expertd.kernels.jit import BUNDLE, cache_directory, find

    report = _build_all(BUNDLE if arguments.bundle else None) if arguments.build else None
    rows = [_row(v.source.name, v.shared_bytes(_NUM_GROUPS), find(v.source)) for v in jit_variants()]
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


def _build_all(directory: Path | None) -> BuildReport:
    """With `directory`, leaves nothing there but binaries. Raises KernelsCommandError if it lacks any."""
    from expertd.kernels.backends import jit_variants
    from expertd.kernels.jit import build_all, cache_directory, check_writable, find
    from expertd.service.util.logs import progress_bar

    sources = [variant.source for variant in jit_variants()]
    if directory is None and any(find(source) is None for source in sources):
        check_writable(cache_directory())
    start = time.perf_counter()
    compiled = 0
    with progress_bar("kernels", len(sources), "kernel") as advance:
        for built, binary in build_all(sources, directory):
            compiled += not binary.cached
            advance(1, built.name)
    middle = time.perf_counter()
    from_cache = sum(binary.cached for _, binary in build_all(sources, directory))
    if from_cache < len(sources):
        target = f"cache: expected to write to {cache_directory()}"
        if directory is not None:
            target = f"bundle: expected to write to {directory}"
        raise KernelsCommandError(f"{target}, which was refused")
    if directory is not None:
        for lock in directory.glob("*.lock"):
            lock.unlink()
    return BuildReport(compiled, middle - start, from_cache, time.perf_counter() - middle)


def _row(name: str, shared_bytes: int, binary: "Binary | None") -> VariantRow:
    if binary is None:
        return VariantRow(name, False, shared_bytes, None, None, None, None)
    usage = binary.usage
    spills = usage.spill_store_bytes + usage.spill_load_bytes
    return VariantRow(name, True, shared_bytes, usage.registers, usage.stack_bytes, spills, binary.seconds)


def _print_table(rows: list[VariantRow]) -> None:
    width = max(len(row.name) for row in rows)
    heads = f"{'registers':>9}  {'shared':>7}  {'stack':>5}  {'spills':>6}  {'compile':>8}  state"
    print(f"{'variant':{width}}  {heads}")
    for row in rows:
        if row.cached:
            uses = (
                f"{row.registers:9}  {row.shared_bytes:7}  {row.stack_bytes:5}  {row.spill_bytes:6}  "
                f"{row.compile_seconds:6.2f} s  cached"
            )
        else:
            uses = f"{'-':>9}  {row.shared_bytes:7}  {'-':>5}  {'-':>6}  {'-':>8}  not compiled"
        print(f"{row.name:{width}}  {uses}")


def _dump(name: str, form: str) -> bytes:
    from expertd.kernels.backends import jit_variants
    from expertd.kernels.jit import build, to_ptx

    sources = {variant.source.name: variant.source for variant in jit_variants()}
    variant = sources.get(name)
    if variant is None:
        raise KernelsCommandError(f"dump: expected one of {', '.join(sources)}, got {name!r}")
    if form == "source":
        return variant.text().encode()
    if form == "ptx":
        return to_ptx(variant).encode()
    if form == "sass":
        return _disassemble(build(variant).cubin)
    return build(variant).cubin


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
