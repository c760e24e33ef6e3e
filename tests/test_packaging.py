"""The tree builds one package, which leaves the name `kernels` to Hugging Face's."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # wheels are built and installed

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BESIDE = Path(sys.prefix) / "beside"
INPUTS = ("pyproject.toml", "README.md", "LICENSE", "src", "kernels", "service", "configs")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The standard output of a command that is expected to succeed."""
    done = subprocess.run(
        command, cwd=cwd, env={"PATH": "", **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wheel_of(source: Path, folder: Path) -> Path:
    """The wheel of a source tree, built into `folder` without a network."""
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the build's inputs, links kept, so that nothing is written into the tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in INPUTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("client")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / "client" / name, copy)
    shutil.copytree(
        ROOT / "client" / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*-info")
    )
    return wheel_of(copy, tmp_path_factory.mktemp("client-wheel"))


def test_the_wheel_holds_one_package_with_every_file_of_it(wheel: Path) -> None:
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names} == {"expertd", f"expertd-{VERSION}.dist-info"}
    expected = {
        f"expertd/{path.relative_to(ROOT)}"
        for folder in ("kernels", "service")
        for pattern in ("*.py", "csrc/*.cu", "csrc/*.cuh", "page/*.*", "*.yaml")
        for path in (ROOT / folder).rglob(pattern)
    }
    for folder in ("/csrc/", "/page/"):
        assert len([name for name in expected if folder in name]) > 1
    assert expected - names == set()


def test_the_wheel_needs_the_client_of_its_version(wheel: Path, client_wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        told = archive.read(f"expertd-{VERSION}.dist-info/METADATA").decode()
    version = client_wheel.name.split("-")[1]
    assert f"Requires-Dist: expertd-client=={version}\n" in told


def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    program = f"import setuptools.build_meta as build; build.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", program, cwd=source)
    # As a program: `extractall` has `filter` from Python 3.11.4 on, and warns without it in 3.12.
    run(sys.executable, "-m", "tarfile", "-e", f"expertd-{VERSION}.tar.gz", tmp_path, cwd=tmp_path)
    assert names_in(wheel_of(tmp_path / f"expertd-{VERSION}", tmp_path)) == names_in(wheel)


@pytest.fixture(scope="module")
def site(wheel: Path, client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our wheels and Hugging Face's `kernels`, installed side by side."""
    others = list(BESIDE.glob("kernels-*.whl"))
    assert others, f"a wheel of `kernels` is expected in {BESIDE}, where `make test` puts it"
    folder = tmp_path_factory.mktemp("site")
    run(
        *PIP,
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        folder,
        wheel,
        client_wheel,
        *others,
        cwd=folder,
    )
    return folder


def test_it_can_be_installed_beside_hugging_faces_kernels(site: Path, tmp_path: Path) -> None:
    program = (
        "import kernels, expertd.kernels, expertd.service\n"
        "for module in (kernels, expertd.kernels, expertd.service): print(module.__file__)\n"
        "print(kernels.get_kernel.__module__)"
    )
    *files, function = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()

    folders = ("kernels", "expertd/kernels", "expertd/service")
    assert files == [str(site / folder / "__init__.py") for folder in folders]
    assert function.startswith("kernels.")
    assert list(site.glob("service*")) == []


def test_a_checkout_called_expertd_does_not_hide_the_package(tmp_path: Path) -> None:
    (
        tmp_path / "expertd"
    ).mkdir()  # as `git clone` names it, and the working directory comes first on sys.path
    program = "import expertd; print(expertd.__version__)"
    assert run(sys.executable, "-c", program, cwd=tmp_path) == f"{VERSION}\n"


def test_the_clients_tests_run_against_an_installed_server(site: Path, tmp_path: Path) -> None:
    """Against the command that EXPERTD names, as `make test-client` has it."""
    command = tmp_path / "expertd"
    command.write_text(f'#!/bin/sh\necho started >> {tmp_path}/log\nexec {site}/bin/expertd "$@"\n')
    command.chmod(0o755)
    tests = ("tests/test_server.py", "-k", "says_about_itself or routing", "-p", "no:cacheprovider")
    folder, path = ROOT / "client", str(site)
    told = run(sys.executable, "-m", "pytest", *tests, cwd=folder, EXPERTD=str(command), PYTHONPATH=path)
    assert "4 passed" in told
    assert (tmp_path / "log").read_text() == "started\n"


def test_the_wheel_has_a_demo_to_serve_without_settings(site: Path, tmp_path: Path) -> None:
    command = site / "bin" / "expertd"
    assert run(command, "--version", cwd=tmp_path, PYTHONPATH=str(site)) == f"expertd {VERSION}\n"
    told = run(command, "check", "--port", "0", "--backend", "reference", cwd=tmp_path, PYTHONPATH=str(site))
    assert f"{site}/expertd/service/settings/demo.yaml:" in told
    assert "no --model or --config: serving a demo layer of random weights" in told
    assert "layers to serve: demo" in told
