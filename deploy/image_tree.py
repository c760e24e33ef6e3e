"""Builds what an image has under /opt/expertd, without Docker: `python -m deploy.image_tree FOLDER`.

Follows the Dockerfile's steps: the locked packages, what is removed, the wheels, kernels for CUDA, a request.
Prints what they weigh. VARIANT=cuda downloads 3 GB and needs 7 GB; neither needs a GPU.
"""

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.slim import UNUSED, size_of, slim
from deploy.try_serve import environment, try_serve
from expertd.kernels.backends import architectures

ROOT = Path(__file__).resolve().parents[1]
_MEGABYTE = 1e6


def build(folder: Path, variant: str) -> None:
    """Build the environment in `folder`, which must not exist. Raises CalledProcessError, RuntimeError."""
    with TemporaryDirectory() as aside:
        _build(folder, variant, Path(aside))


def _build(folder: Path, variant: str, aside: Path) -> None:
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    install = ("install", "--no-compile")
    if variant == "cpu":
        _pip(python, *install, "--no-deps", "-r", ROOT / "requirements" / "torch-cpu.txt")
    _pip(python, *install, "--require-hashes", "-r", ROOT / "requirements" / f"{variant}.txt")
    _pip(python, "check")
    _report("locked packages", folder)
    if variant == "cuda":
        shutil.copytree(packages / "triton", aside / "triton")
    for what, num_bytes in slim(packages).items():
        print(f"{-num_bytes / _MEGABYTE:8.1f} MB  {what:34} {UNUSED.get(what, '')}")
    _report("after removal", folder)
    wheel = ("wheel", "--no-deps", "--no-index", "--no-build-isolation")
    _pip(python, *wheel, "-w", folder / "dist", ROOT, ROOT / "client")
    _pip(python, *install, "--no-deps", "--no-index", *(folder / "dist").glob("*.whl"))
    if variant == "cuda":
        for backend in ("hopper", "triton"):
            for architecture in architectures(backend):
                _bundle(folder, backend, architecture, aside)
            _report(f"with the kernels of {backend}", folder)
    try_serve(python, ROOT / "configs" / "demo.yaml")
    _report("after a request", folder)


def _bundle(folder: Path, backend: str, architecture: str, aside: Path) -> None:
    """Compile a backend's kernels into the environment, with what is `aside` to import."""
    command = (folder / "bin" / "expertd", "kernels", "--build", "--bundle")
    of = ("--backend", backend, "--arch", architecture)
    variables = environment() | {"PYTHONPATH": str(aside)}
    subprocess.run([*command, *of], check=True, stdout=subprocess.DEVNULL, env=variables)


def _pip(python: Path, command: str, *arguments: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python)
    subprocess.run([*pip, command, *arguments], check=True, cwd=ROOT)


def _report(what: str, folder: Path) -> None:
    print(f"{size_of(folder) / _MEGABYTE:8.1f} MB  {what}", flush=True)


def main() -> None:
    """Build one variant."""
    parser = argparse.ArgumentParser(description="Builds what an image has under /opt/expertd.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    build(arguments.folder, arguments.variant)


if __name__ == "__main__":
    main()
