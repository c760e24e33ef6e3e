"""The Makefile, the workflow and the hooks name the same chores."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.paths import ROOT
from tests.test_lock import PYTHONS

MAKEFILE = (ROOT / "Makefile").read_text()
CHORES = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[0].split()


def chores_run_by(text: str) -> set[str]:
    """Every X of `make X` in a file's commands."""
    commands = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return set(re.findall(r"\bmake ([a-z-]+)", commands))


def test_make_alone_lists_every_chore_in_one_line() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert [(word, chore) for word, chore, _ in listed] == [("make", chore) for chore in CHORES]
    assert all(len(line) <= 110 for line in done.stdout.splitlines())


def test_every_way_to_check_runs_make_check() -> None:
    assert "check" in CHORES
    assert chores_run_by((ROOT / ".ci/run").read_text()) == {"check"}
    assert chores_run_by((ROOT / ".github/workflows/check.yml").read_text()) == {"check"}
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert chores_run_by(hooks) == {"lint", "test"}
    assert {repo["repo"] for repo in yaml.safe_load(hooks)["repos"]} == {"local"}


def test_all_is_what_needs_no_gpu() -> None:
    done = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, capture_output=True, text=True, check=True)
    for marks in ("not gpu and not timing", "timing and not gpu"):
        found = re.findall(rf'^(.*)-m pytest .*-m "{marks}"$', done.stdout, re.M)
        folders = {line.rpartition("&&")[0].strip() for line in found}
        assert folders - {"cd engines/sglang"} == {"", "cd client"}, marks


@pytest.mark.parametrize(
    ("nvidia_smi", "variant"), [("echo 'GPU 0: NVIDIA GeForce RTX 4070'", "cuda"), ("exit 9", "cpu")]
)
def test_serve_installs_cuda_and_triton_where_there_is_a_gpu(
    nvidia_smi: str, variant: str, tmp_path: Path
) -> None:
    """Any GPU that the driver lists; without a driver nvidia-smi fails, or is not there."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("VARIANT", "MAKEFLAGS")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "-B", "serve", "CONFIG=configs/rtx4070.yaml"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (locked,) = re.findall(r"--require-hashes -r requirements/(\w+)\.txt$", done.stdout, re.M)
    assert locked == variant
    assert done.stdout.splitlines()[-1] == ".venv/bin/expertd serve --config configs/rtx4070.yaml --port 8000"
    names = re.findall(r"^([\w-]+)==", (ROOT / "requirements" / f"{variant}.txt").read_text(), re.M)
    assert {"triton", "cuda-core"}.issubset(names) is (variant == "cuda")


def test_the_workflow_runs_on_every_supported_python() -> None:
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    assert workflow["jobs"]["check"]["strategy"]["matrix"] == {"python": list(PYTHONS)}


def test_the_workflows_actions_are_pinned() -> None:
    used = re.findall(r"uses: (\S+)", (ROOT / ".github/workflows/check.yml").read_text())
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)] == []


def test_contributing_names_paths_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layout")[2]
    named = [name for name in re.findall(r"`((?:\w+/)+[\w.]*)`", text) if "NAME" not in name]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
