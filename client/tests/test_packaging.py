"""The distribution stands on its own: NumPy is all that it needs."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

from expertd_client import __version__

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path, path: str = "") -> str:
    """The standard output of a command that is expected to succeed."""
    environment = {"PYTHONPATH": path} if path else {}
    done = subprocess.run(
        command, cwd=cwd, env={"PATH": "", **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_imports_neither_the_server_nor_torch() -> None:
    program = (
        "import sys, expertd_client, expertd_client.__main__\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    path = ":".join(entry for entry in sys.path if entry)
    loaded = run(sys.executable, "-c", program, cwd=ROOT, path=path).split()
    assert "expertd_client" in loaded
    assert not {"expertd", "torch", "ml_dtypes", "tqdm", "httpx", "uvloop", "prometheus_client"} & set(loaded)


def test_neither_it_nor_its_tests_import_the_server() -> None:
    """So the tests run against any server that is installed, wherever that is."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert len(files) > 60
    imports = re.compile(r"^\s*(?:import|from)\s+expertd\b", re.M)
    assert [str(file) for file in files if imports.search(file.read_text())] == []


@pytest.mark.slow
@pytest.mark.thorough
def test_the_wheel_runs_with_numpy_alone(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for file in (ROOT / "src").rglob("*"):
        if file.suffix in (".py", ".typed"):
            copy = source / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"expertd_client-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "expertd_client/py.typed" in names
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert files - set(names) == set()

    site = tmp_path / "site"
    run(*pip, "install", *offline, "--target", site, wheel, cwd=tmp_path)
    for name in ("numpy", "numpy.libs"):  # the only other packages in sight
        folder = Path(numpy.__file__).parents[1] / name
        if folder.exists():
            (site / name).symlink_to(folder)
    program = "import expertd_client, numpy; print(expertd_client.__file__, expertd_client.__version__)"
    told = run(sys.executable, "-S", "-c", program, cwd=tmp_path, path=str(site))
    assert told.split() == [str(site / "expertd_client" / "__init__.py"), __version__]
