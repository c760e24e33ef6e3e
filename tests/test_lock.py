"""The lock files and the bill of materials fit pyproject.toml and each other, on every supported Python."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import expertd_client
from requirements import lock

PROJECT: dict[str, Any] = tomllib.loads((lock.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12")
RENEW = "run `make lock`"


@cache
def locked(name: str) -> list[Requirement]:
    """Every requirement of one lock file."""
    text = (lock.ROOT / "requirements" / name).read_text()
    return [Requirement(line) for line in re.findall(r"^([\w.-]+==[^\\\n]*?) *\\?$", text, re.M)]


def pins(name: str, python: str) -> dict[str, str]:
    """Package to version, as `python` on Linux installs them from one lock file."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    found = [
        requirement
        for requirement in locked(name)
        if requirement.marker is None or requirement.marker.evaluate(environment)
    ]
    versions: dict[str, str] = {
        canonicalize_name(requirement.name): str(requirement.specifier)[2:] for requirement in found
    }
    assert len(versions) == len(found), f"one version of a package is expected on Python {python}"
    return versions


def required(texts: list[str]) -> Iterator[Requirement]:
    """`texts` as requirements, with the project's own extras expanded."""
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                yield from required(EXTRAS[extra])
        elif requirement.name != lock.OURS:
            yield requirement


def test_the_locks_match_the_requirements() -> None:
    assert lock.stale() == [], RENEW


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("cpu.txt", PROJECT["dependencies"] + EXTRAS["cpu"]),
        ("cuda.txt", PROJECT["dependencies"] + EXTRAS["cuda"]),
        ("dev.txt", PROJECT["dependencies"] + EXTRAS["dev"]),
    ],
)
def test_every_requirement_is_pinned_within_its_range(name: str, texts: list[str], python: str) -> None:
    versions = pins(name, python)
    if name != "cuda.txt":
        assert "torch" not in versions
        versions = {**versions, "torch": lock.torch_version()}
    for requirement in required(texts):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is expected in requirements/{name}: {RENEW}"
        assert version in requirement.specifier, f"{requirement} is expected, locked is {version}: {RENEW}"


@pytest.mark.parametrize("python", PYTHONS)
def test_a_package_has_one_version_in_all_locks(python: str) -> None:
    cpu, cuda, dev = (pins(name, python) for name in ("cpu.txt", "cuda.txt", "dev.txt"))
    assert cpu.items() <= dev.items()
    assert cpu.keys() - cuda.keys() == {Requirement(text).name for text in EXTRAS["cpu"]}
    assert {name: cpu[name] for name in cpu.keys() & cuda.keys()}.items() <= cuda.items()
    assert {name: cuda[name] for name in dev.keys() & cuda.keys()}.items() <= dev.items()
    assert cuda["torch"] == lock.torch_version()
    assert [name for name in cpu if re.match(r"nvidia|cuda|triton", name)] == []
    assert "nvidia-cuda-nvrtc" in cuda


def test_python_versions_match_the_projects() -> None:
    (lowest, above) = re.findall(r"3\.\d+", PROJECT["requires-python"])
    assert PYTHONS[0] == lowest
    assert int(PYTHONS[-1].split(".")[1]) + 1 == int(above.split(".")[1])


@pytest.mark.parametrize("name", lock.LOCKS)
def test_every_package_has_hashes_and_no_url(name: str) -> None:
    text = (lock.ROOT / "requirements" / name).read_text()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.M)[1:]
    assert len(entries) == len(locked(name)) > 0
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text
    assert str(lock.ROOT) not in text


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("pyproject.toml", '"numpy>=2.0"', '"numpy>=2.1"'),
        ("pyproject.toml", '"pytest>=8.3",', ""),
        ("pyproject.toml", "requires-python = ", "requires-python = '>=3.12' # "),
        ("pyproject.toml", "setuptools>=", "setuptools>=1"),
        ("requirements/torch-cpu.txt", lock.torch_version(), "99.0"),
        ("requirements/dev.txt", "SHA-256", "SHA"),
    ],
)
def test_a_changed_requirement_makes_the_locks_stale(tmp_path: Path, path: str, old: str, new: str) -> None:
    shutil.copy(lock.ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(lock.ROOT / "requirements", tmp_path / "requirements")
    assert lock.stale(tmp_path) == lock.stale()
    text = (tmp_path / path).read_text()
    assert old in text

    (tmp_path / path).write_text(text.replace(old, new))

    assert lock.stale(tmp_path) == (["dev.txt"] if path.endswith("dev.txt") else list(lock.LOCKS))


FILES = {"cpu": ("torch-cpu.txt", "cpu.txt"), "cuda": ("cuda.txt",)}


@pytest.mark.parametrize("variant", FILES)
def test_it_has_every_package_with_its_hashes(variant: str) -> None:
    command = [sys.executable, "-m", "requirements.sbom", variant]
    done = subprocess.run(command, cwd=lock.ROOT, capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "expertd")
    expected = {
        (requirement.name, str(requirement.specifier).removeprefix("=="))
        for name in FILES[variant]
        for requirement in locked(name)
    } | {(lock.OURS, expertd_client.__version__)}
    assert {(each["name"], each["version"]) for each in bill["components"]} == expected
    texts = [(lock.ROOT / "requirements" / name).read_text() for name in FILES[variant]]
    listed = {digest for text in texts for digest in re.findall(r"sha256:([0-9a-f]{64})", text)}
    hashes = {digest["content"] for each in bill["components"] for digest in each.get("hashes", ())}
    assert hashes == listed
    names = [each["bom-ref"] for each in bill["components"]]
    assert len(names) == len(set(names))
