"""CPUs by the affinity mask and by quotas: what is found, and what OpenMP, torch and `check` make of it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expertd.backends import BACKENDS
from expertd.cpus import Cpus, cpus
from expertd.service.commands import cpus as command
from expertd.service.commands.cpus import check_cpus, prepare_openmp
from tests.service.apps import tiny_settings
from tests.service.cgroups import V2, fake_groups

HOPPER, REFERENCE = BACKENDS["hopper"], BACKENDS["reference"]

HALF = {"cpu.max": "50000 100000\n"}
V1 = ("cgroup", "rw,cpu,cpuacct")
V1_FILES = {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"}


def within(folder: str, files: Mapping[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("own", "mounts", "files", "quota"),
    [
        # version 2: a container that sees its group as the root
        ("0::/\n", [("/", "cg", V2)], within("cg", HALF), 0.5),
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max": "max 100000\n"}, None),
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max": "333333 100000"}, 3.33333),
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max": "7000 10000\n"}, 0.7),
        # a service: the least of its own and those above
        ("0::/a/b\n", [("/", "cg", V2)], within("cg/a/b", HALF), 0.5),
        ("0::/a/b\n", [("/", "cg", V2)], {**within("cg/a", HALF), "cg/a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/a/b\n", [("/", "cg", V2)], {**within("cg/a", HALF), "cg/a/b/cpu.max": "20000 100000"}, 0.2),
        ("0::/a/b\n", [("/", "cg", V2)], {**within("cg", HALF), "cg/a/b/cpu.max": "900000 100000"}, 0.5),
        ("0::/a/b\n", [("/", "cg", V2)], within("cg/a/other", HALF), None),
        # a container without a namespace of its own: the group that is mounted has the process's path
        ("0::/docker/abc\n", [("/docker/abc", "cg", V2)], within("cg", HALF), 0.5),
        ("0::/docker/abc/x\n", [("/docker/abc", "cg", V2)], within("cg/x", HALF), 0.5),
        ("0::/docker/abc\n", [("/", "cg", V2)], within("cg", HALF), 0.5),
        # a namespace whose root is not above the process, or below the mount
        ("0::/../x\n", [("/", "cg", V2)], within("cg", HALF), 0.5),
        ("0::/../x\n", [("/", "cg", V2)], {**within("x", HALF), "cg/x": ""}, None),
        ("0::/\n", [("/../..", "cg", V2)], within("cg", HALF), 0.5),
        # version 1, with controllers that are mounted together or apart
        ("4:cpu,cpuacct:/\n", [("/", "cg/cpu", V1)], within("cg/cpu", V1_FILES), 2.5),
        ("4:cpu:/a\n", [("/", "elsewhere", ("cgroup", "rw,cpu"))], within("elsewhere/a", V1_FILES), 2.5),
        ("4:cpu:/a/b\n", [("/", "cg", V1)], within("cg/a", V1_FILES), 2.5),
        ("4:cpu:/a\n", [("/", "cg", V1)], {**within("cg/a", V1_FILES), "cg/a/cpu.cfs_quota_us": "-1"}, None),
        ("4:cpu:/\n", [("/", "cg", V1)], {**within("cg", V1_FILES), "cg/cpu.cfs_period_us": "0"}, None),
        ("3:cpuset:/\n4:memory:/\n", [("/", "cg", V1)], within("cg", V1_FILES), None),
        ("4:cpuacct:/\n", [("/", "cg", ("cgroup", "rw,cpuacct"))], within("cg", V1_FILES), None),
        # both
        (
            "4:cpu:/a\n1:name=systemd:/a\n0::/b\n",
            [("/", "cpu", V1), ("/", "systemd", ("cgroup", "rw,name=systemd")), ("/", "unified", V2)],
            {**within("cpu/a", V1_FILES), **within("unified/b", HALF), **within("systemd/a", V1_FILES)},
            0.5,
        ),
        # odd names
        ("0::/a b:c\n", [("/", "with space", V2)], within("with space/a b:c", HALF), 0.5),
        # what is no quota limits nothing
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max": ""}, None),
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max": "50000\n"}, None),
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max": "many 100000\n"}, None),
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max": "0 100000\n"}, None),
        ("0::/\n", [("/", "cg", V2)], {"cg/cpu.max/is": "a folder"}, None),
        ("", [("/", "cg", V2)], within("cg", HALF), None),
        ("what\n::\n0::/\n", [("/", "cg", V2)], within("cg", HALF), 0.5),
        ("0::/\n", [], within("cg", HALF), None),
    ],
)
def test_the_least_quota_counts(
    tmp_path: Path, own: str, mounts: list[tuple[str, str, tuple[str, str]]], files: dict[str, str],
    quota: float | None,
) -> None:  # fmt: skip
    found = cpus(fake_groups(tmp_path, own, mounts, files))
    assert found.quota == pytest.approx(quota) if quota else found.quota is None
    assert found.affinity == len(os.sched_getaffinity(0))


def test_a_system_without_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpus(tmp_path).quota is None


@pytest.mark.parametrize(
    ("affinity", "quota", "count"),
    [
        (8, None, 8),
        (8, 1.5, 1),
        (8, 0.1, 1),
        (8, 1.0, 1),
        (8, 2.0, 2),
        (8, 7.99, 7),
        (2, 6.5, 2),
        (1, 9.0, 1),
    ],
)
def test_quotas_are_rounded_down(affinity: int, quota: float | None, count: int) -> None:
    assert Cpus(affinity, quota).count == count


@pytest.mark.parametrize(
    ("found", "backend", "gpu", "given", "expected"),
    [
        (Cpus(8, None), "auto", False, {}, {"OMP_WAIT_POLICY": "passive"}),
        (Cpus(8, 2.5), "auto", False, {}, {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"}),
        (Cpus(8, 0.5), "auto", False, {}, {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}),
        (Cpus(2, 9.0), "auto", False, {}, {"OMP_WAIT_POLICY": "passive"}),
        (Cpus(8, 2.5), "auto", False, {"OMP_NUM_THREADS": "5"}, {"OMP_WAIT_POLICY": "passive"}),
        (Cpus(8, 2.5), "auto", False, {"OMP_NUM_THREADS": "4,2"}, {"OMP_WAIT_POLICY": "passive"}),
        *(
            (
                Cpus(8, 2.5),
                "auto",
                False,
                {"OMP_NUM_THREADS": none, "OMP_WAIT_POLICY": ""},
                {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
            )
            for none in ("", " ", "abc", "0", "-3", "2,")
        ),
        (Cpus(8, None), "auto", False, {"OMP_WAIT_POLICY": "active"}, {}),
        (Cpus(8, None), "auto", True, {}, {}),
        (Cpus(8, None), "hopper", True, {}, {}),
        (Cpus(8, None), "reference", True, {}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_openmp_is_told_what_the_user_has_not_said(
    monkeypatch: pytest.MonkeyPatch, found: Cpus, backend: str, gpu: bool, given: dict[str, str],
    expected: dict[str, str],
) -> None:  # fmt: skip
    environment = dict(given)
    monkeypatch.setattr(command, "cpus", lambda: found)
    monkeypatch.setattr(command, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(command, "Path", lambda _: SimpleNamespace(glob=lambda _: ["nvidia0"] * gpu))
    prepare_openmp(tiny_settings(backend=backend))
    assert environment == {**given, **expected}


@pytest.mark.parametrize(
    ("found", "ranks", "threads", "text"),
    [
        (Cpus(8, None), 1, 8, "8 by affinity, no quota; torch has 8 threads"),
        (Cpus(8, 1.5), 1, 1, "8 by affinity, 1.5 by quota; torch has 1 thread"),
        (Cpus(8, 4.0), 2, 4, "8 by affinity, 4 by quota; torch has 2 threads in each of 2 ranks"),
        (Cpus(8, 7.5), 2, 7, "8 by affinity, 7.5 by quota; torch has 3 threads in each of 2 ranks"),
        (
            Cpus(8, 2.0),
            1,
            8,
            "warning: 8 by affinity, 2 by quota; torch has 8 threads, more than the 2 that may run at once",
        ),
        (
            Cpus(2, 1.5),
            2,
            1,
            "warning: 2 by affinity, 1.5 by quota; torch has 1 thread in each of 2 ranks, "
            "more than the 1 that may run at once",
        ),
    ],
)
def test_check_says_what_was_found(
    monkeypatch: pytest.MonkeyPatch, found: Cpus, ranks: int, threads: int, text: str
) -> None:
    monkeypatch.setattr(command, "cpus", lambda: found)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert check_cpus(tiny_settings(ranks=ranks), REFERENCE) == text
    if ranks == 1:
        counted = f"{found}; kernels are compiled by {found.count} at once"
        assert check_cpus(tiny_settings(), HOPPER) == counted


def test_the_affinity_mask_counts() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        assert cpus().affinity == cpus().count == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.thorough
def test_torch_is_imported_after_openmp_is_told(config: Path) -> None:
    """In a new process, a quota is the number of torch's threads."""
    program = (
        "import sys\n"
        "from expertd.cpus import Cpus\n"
        "from expertd.service.commands import cpus as command\n"
        "command.cpus = lambda: Cpus(64, 1.5)\n"
        "from expertd.service.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "EXPERTD_"))
    }
    command_line = [sys.executable, "-c", program, "check", "--config", str(config)]
    result = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=False)
    assert "64 by affinity, 1.5 by quota; torch has 1 thread\n" in result.stdout, result.stderr
