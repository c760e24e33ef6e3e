"""The lock files of this folder: `make lock` writes them, `python -m requirements.lock --check` compares them.

| file | holds |
|---|---|
| torch-cpu.txt | torch for machines without an NVIDIA GPU, chosen by hand |
| cpu.txt | what the server needs beside that torch |
| cuda.txt | what the server needs on an NVIDIA GPU, torch with its CUDA libraries included |
| dev.txt | what tests, lint and benchmarks need, for on top of either |
| beside.txt | wheels that a test installs in a folder of its own |

One resolution for Python 3.11 and 3.12 gives every file its versions, so a package has the same one in all of them.
Standard library only: `--check` runs before anything is installed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("cpu.txt", "cuda.txt", "dev.txt", "beside.txt")
_BESIDE = "kernels"  # Hugging Face's, whose name our own folder has
_OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")  # torch's dependencies that its CPU build does not have


def fingerprint(root: Path = ROOT) -> str:
    """SHA-256 of all that the locks follow from: pyproject.toml's requirements and the version of torch."""
    parsed = tomllib.loads((root / "pyproject.toml").read_text())
    project = parsed["project"]
    inputs = (
        parsed["build-system"]["requires"],
        project["requires-python"],
        project["dependencies"],
        project["optional-dependencies"],
        torch_version(root),
    )
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def torch_version(root: Path = ROOT) -> str:
    """The version in torch-cpu.txt, without the name of the build."""
    (version,) = re.findall(r"^torch==([\d.]+)\+cpu$", (root / "requirements/torch-cpu.txt").read_text(), re.M)
    return str(version)


def stale(root: Path = ROOT) -> list[str]:
    """The lock files that were written for other requirements than today's, or are missing."""
    expected = _header(root)
    paths = [root / "requirements" / name for name in LOCKS]
    return [path.name for path in paths if not path.is_file() or not path.read_text().startswith(expected)]


def write(upgrade: bool, root: Path = ROOT) -> None:
    """Resolve anew and write all files; pins that still fit stay unless `upgrade`."""
    folder = root / "requirements"
    with tempfile.TemporaryDirectory() as scratch:
        everything = Path(scratch, "everything.txt")
        cpu_torch = Path(scratch, "uv.toml")
        before = [path.read_text() for name in LOCKS if (path := folder / name).is_file()]
        everything.write_text("" if upgrade else "".join(before))
        cpu_torch.write_text("")
        inputs = [f"torch=={torch_version(root)}", *_build_requirements(root)]
        _compile(inputs, ["pyproject.toml", "--extra=cuda", "--extra=dev"], cpu_torch, everything, root)
        pins = everything.read_text()
        for name, extras in (("cpu.txt", []), ("cuda.txt", ["--extra=cuda"]), ("dev.txt", ["--extra=dev"])):
            for_cuda = name == "cuda.txt"
            cpu_torch.write_text("" if for_cuda else _cpu_metadata(pins, root))
            options = ["pyproject.toml", *extras, "--generate-hashes"]
            options += [] if for_cuda else ["--no-emit-package=torch"]
            _write_lock(inputs, options, cpu_torch, folder / name, pins, root)
        pins = "" if upgrade else "".join(before)
        _write_lock([_BESIDE], ["--no-deps", "--generate-hashes"], cpu_torch, folder / "beside.txt", pins, root)


def _write_lock(
    inputs: Sequence[str], options: Sequence[str], config: Path, path: Path, pins: str, root: Path
) -> None:
    """Compile into `path`, preferring the versions of `pins`, and put the header on top."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, path.name)
        output.write_text(pins)
        _compile(inputs, options, config, output, root)
        path.write_text(_header(root) + output.read_text())
    print(f"wrote {path.relative_to(root)}")


def _compile(
    inputs: Sequence[str], options: Sequence[str], config: Path, output: Path, root: Path
) -> None:
    """Resolve `inputs` for every supported Python. What `output` holds already is preferred, then replaced."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
    command += ["--no-header", "--annotation-style=line", f"--config-file={config}", f"--output-file={output}"]
    text = "\n".join(inputs)
    subprocess.run([*command, *options, "-"], input=text, text=True, cwd=root, env=os.environ, check=True)


def _build_requirements(root: Path) -> list[str]:
    """What builds the server itself: its editable install and its wheel take it from the lock."""
    requirements: list[str] = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
    return requirements


def _cpu_metadata(pins: str, root: Path) -> str:
    """uv's configuration that gives torch the dependencies of its CPU build: those that have no CUDA in them."""
    names = re.findall(r"^([\w.-]+)==.*# via (?:.*, )?torch(?:,|$)", pins, re.M)
    requires = sorted({name for name in names if not _OF_CUDA.match(name)})
    version = torch_version(root)
    return f'[[dependency-metadata]]\nname = "torch"\nversion = "{version}"\nrequires-dist = {json.dumps(requires)}\n'


def _header(root: Path) -> str:
    return f"# Written by `make lock`; do not edit. Of requirements with SHA-256 {fingerprint(root)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the locks, or with --check say which do not fit pyproject.toml; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes or checks the lock files in requirements/.")
    parser.add_argument("--check", action="store_true", help="only compare them with pyproject.toml")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    arguments = parser.parse_args(argv)
    if not arguments.check:
        write(arguments.upgrade)
        return 0
    if old := stale():
        print(f"requirements/: {', '.join(old)} not locked for pyproject.toml as it is: run `make lock`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
