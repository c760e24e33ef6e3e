"""`expertd kernels --backend triton`, without a GPU: what Triton compiles is replaced, but for one kernel."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from expertd.kernels import jit
from expertd.kernels.backends import triton as of_triton
from expertd.kernels.backends import why_not
from expertd.kernels.backends.triton import build
from expertd.kernels.backends.triton.backend import TritonBackend
from expertd.kernels.backends.triton.build import TritonBinary
from expertd.kernels.backends.triton.targets import TARGETS
from expertd.kernels.backends.triton.variants import variants_for
from expertd.service.cli import main

pytest.importorskip("triton", reason="needs Triton's metadata")

NAMES = [variant.name for variant in variants_for(TARGETS[89])]
ARGUMENTS = ["kernels", "--backend", "triton", "--arch", "sm_89"]


@pytest.fixture(autouse=True)
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty bundle beside an empty cache, and binaries of no compiler."""
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "BUNDLE", tmp_path / "built")
    monkeypatch.setattr("expertd.kernels.jit.cache.BUNDLE", tmp_path / "built")
    monkeypatch.setattr(
        build, "compile_variant", lambda variant, target: TritonBinary(b"\x7fELF", 1024, 1, 80, 16, 0.25)
    )
    return tmp_path / "built"


def test_all_kernels_are_listed_and_none_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == NAMES
    assert out.count("not compiled") == len(NAMES)


def test_a_build_lists_their_resources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*ARGUMENTS, "--build", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (report["build"]["compiled"], report["build"]["from_cache"]) == (len(NAMES), len(NAMES))
    assert {tuple(list(row.values())[1:]) for row in report["variants"]} == {(True, 1024, 80, 16, None, 0.25)}
    assert main(ARGUMENTS) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == [NAMES[0], "80", "1024", "16", "-", "0.25", "s", "cached"]


def test_a_target_has_binaries_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--build"]) == 0
    capsys.readouterr()
    assert main(["kernels", "--backend", "triton", "--arch", "sm_86", "--json"]) == 0
    assert not any(row["cached"] for row in json.loads(capsys.readouterr().out)["variants"])


def test_a_bundle_serves_where_triton_is_not_installed(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package's metadata is, as in the image, but for the last question."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(of_triton, "find_spec", lambda name: None if name == "triton" else name)
    device = torch.device("cuda", 0)
    assert why_not("triton", device) == "no triton installed"
    assert main([*ARGUMENTS, "--build", "--bundle"]) == 0
    assert {path.suffix for path in bundle.iterdir()} == {".bin"}
    assert len(list(bundle.iterdir())) == len(NAMES)
    assert why_not("triton", device) is None
    monkeypatch.setitem(sys.modules, "triton", None)
    backend = of_triton.create()
    assert isinstance(backend, TritonBackend)
    target = backend._kernels.target
    found = dict(build.build_all(list(variants_for(target)), target))
    assert [variant.name for variant in found if not found[variant].cached] == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert why_not("triton", device) == "no triton installed", "the bundle is for another target"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    (first, *_) = bundle.iterdir()
    first.unlink()
    assert why_not("triton", device) == "no triton installed", "one kernel is missing"


def test_without_triton_the_list_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert main(ARGUMENTS) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "expertd kernels: Triton: expected it to be installed (it comes with torch's CUDA"
    )
    assert error.count("\n") == 1


def test_the_source_is_the_module_below_the_variant(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main([*ARGUMENTS, "--dump", "permute_e4m3"]) == 0
    out = capfdbinary.readouterr().out.decode()
    assert out.startswith("# TritonVariant(name='permute_e4m3'")
    assert "def permute(" in out


DUMP = r"""
import sys
from expertd.service.cli import main

for form in ("ptx", "sass"):
    assert main([*sys.argv[1:], form]) == 0
    print("\f", flush=True)
"""


@pytest.mark.thorough  # LLVM
def test_a_kernel_is_dumped(tmp_path: Path) -> None:
    """In a process of its own, which does not interpret kernels."""
    command = [sys.executable, "-c", DUMP, "kernels", "--backend", "triton", "--arch", "sm_120"]
    command += ["--dump", "scatter_rows", "--format"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", jit.CACHE_DIR_VARIABLE: str(tmp_path)}
    dumped = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    ptx, sass, _ = dumped.split("\f")
    assert ".target sm_120a" in ptx
    assert ".target sm_120a" not in sass
    for text in (ptx, sass):
        assert "sm_120a" in text
        assert "scatter_rows" in text
