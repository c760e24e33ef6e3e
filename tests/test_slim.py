"""What deploy/slim.py removes from an image is nothing that a server opens."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from deploy import slim
from deploy.try_serve import try_serve
from tests.paths import DEMO
from tests.service.processes import serving

pytestmark = pytest.mark.thorough

PACKAGES = Path(numpy.__file__).parents[1]
_FILES = {
    "torch/test/test_jit.so": True,
    "torch/bin/protoc": True,
    "torch/bin/torch_shm_manager": False,
    "torch/include/ATen/ATen.h": True,
    "torch/testing/_comparison.py": False,
    "torch/lib/libtorch_cuda_linalg.so": True,
    "torch/lib/libtorch_cuda.so": False,
    "numpy/_core/tests/test_dtype.py": True,
    "numpy/testing/__init__.py": False,
    "numpy/__init__.pyi": True,
    "nvidia/cu13/lib/libcudart.so.13": False,
    "nvidia/cu13/lib/libcudart_static.a": True,
    "nvidia/cu13/lib/libnvrtc.so.13": False,
    "nvidia/cu13/lib/libnvrtc.alt.so.13": True,
    "nvidia/cu13/lib/libnvrtc-builtins.so.13.0": False,
    "nvidia/cu13/nvvm/bin/cicc": True,
    "nvidia/cu13/include/cuda.h": True,
    "nvidia/cudnn/lib/libcudnn.so.9": False,
    "nvidia/cudnn/lib/libcudnn_adv.so.9": True,
    "triton/_C/libtriton.so": True,
    "fastapi/routing.py": False,
    "fastapi/__pycache__/routing.cpython-312.pyc": True,
}


def test_slim_removes_what_it_says_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
    monkeypatch.setattr(slim, "_STRIPPED", ())
    monkeypatch.setattr(slim, "needed_libraries", lambda packages: set())

    saved = slim.slim(tmp_path)

    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {name for name, is_removed in _FILES.items() if not is_removed}
    assert sum(saved.values()) == 100 * sum(_FILES.values())
    assert {name: slim.is_unused(name) for name in _FILES} == _FILES


def test_a_library_without_symbols_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "one.c", tmp_path / "torch" / "lib" / "libone.so"
    source.write_text("static int hidden(void) { return 1; }\nint one(void) { return hidden(); }\n")
    library.parent.mkdir(parents=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-g", "-o", library, source], check=True)
    assert slim.slim(tmp_path)["strip torch/lib/*.so*"] > 1000
    load = f"import ctypes; assert ctypes.CDLL({str(library)!r}).one() == 1"
    subprocess.run([sys.executable, "-c", load], check=True)


def test_a_library_that_one_of_torch_needs_stays(tmp_path: Path) -> None:
    solver, other = (tmp_path / f"nvidia/cu13/lib/libcusolver{name}.so" for name in ("", "Mg"))
    library = tmp_path / "torch/lib/libtorch_cuda.so"
    for each in (solver, other, library):
        each.parent.mkdir(parents=True, exist_ok=True)
        needs: list[str | Path] = ["-Wl,--no-as-needed", solver] if each is library else []
        soname = f"-Wl,-soname,{each.name}"
        subprocess.run(
            ["gcc", "-shared", "-x", "c", "/dev/null", "-x", "none", *needs, soname, "-o", each], check=True
        )
    slim.slim(tmp_path)
    assert (solver.exists(), other.exists()) == (True, False)


@pytest.mark.slow
def test_a_server_opens_nothing_that_is_removed(tmp_path: Path) -> None:
    """Modules that are imported, from any package, and libraries that are mapped."""
    trace = tmp_path / "sitecustomize.py"
    names = tmp_path / "modules"
    trace.write_text(
        "import atexit, sys\n"
        f"atexit.register(lambda: open({str(names)!r}, 'w').write('\\n'.join("
        "str(getattr(m, '__file__', None)) for m in list(sys.modules.values()))))\n"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        with serving(["--config", DEMO], tmp_path, fork=False) as server:
            maps = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()
            server.terminate()
            server.process.wait(60)
    opened = {Path(line.split(maxsplit=5)[5]) for line in maps if line.count("/") > 1}
    opened |= {Path(line) for line in names.read_text().splitlines()}
    below = [str(path.relative_to(PACKAGES)) for path in opened if path.is_relative_to(PACKAGES)]
    assert any(name.endswith("libtorch_cpu.so") for name in below)
    assert "torch/__init__.py" in below
    assert [name for name in below if slim.is_unused(name) and "__pycache__" not in name] == []


@pytest.mark.slow
def test_a_request_is_tried() -> None:
    try_serve(Path(sys.executable), DEMO)


@pytest.mark.slow
def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("models: 1\n")
    with pytest.raises(RuntimeError, match=r"expected it to be ready .* models: expected"):
        try_serve(Path(sys.executable), config)
