"""A forked process looks like one that subprocess.Popen starts, to its parent and to itself."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.children import command_of
from tests.service.forking import CAN_FORK, ForkedProcess
from tests.service.waiting import wait_for

pytestmark = [
    pytest.mark.slow,  # it imports torch
    pytest.mark.skipif(not CAN_FORK, reason="on machines with GPUs, processes are new"),
]


def program(directory: Path, text: str) -> Path:
    """A script."""
    path = directory / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("start", [subprocess.Popen, ForkedProcess])
def test_what_a_program_sees(start: type[ForkedProcess], tmp_path: Path) -> None:
    told, other = (tmp_path / name for name in ("told", "other"))
    (tmp_path / "sitecustomize.py").write_text("import os\nos.customized = True\n")
    text = """import json, os, sys
os.write(int(sys.argv[1]), b"passed")
listed = [int(name) for name in os.listdir("/proc/self/fd")]
descriptors = sorted(each for each in listed if os.path.exists(f"/proc/self/fd/{each}"))
leads = os.getpgid(0) == os.getpid()
seen = sys.argv[1:], os.environ["A"], os.customized, descriptors, leads, os.getppid(), sys.stdin.read()
print(json.dumps(seen), file=sys.stderr)
sys.exit(3)
"""
    with told.open("wb") as stderr, other.open("wb") as file:
        descriptor = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 100)
        process = start(
            [sys.executable, program(tmp_path, text), str(descriptor)],
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "A": "b", "PYTHONPATH": str(tmp_path)},
            pass_fds=(descriptor,),
            process_group=0,
        )
        os.close(descriptor)
        assert process.wait(60) == 3, told.read_text()
    assert json.loads(told.read_text()) == [
        [str(descriptor)], "b", True, [0, 1, 2, descriptor], True, os.getpid(), "",
    ]  # fmt: skip
    assert other.read_bytes() == b"passed"


@pytest.mark.parametrize("start", [subprocess.Popen, ForkedProcess])
def test_how_a_program_ends(start: type[ForkedProcess], tmp_path: Path) -> None:
    script = program(tmp_path, "import time\ntime.sleep(60)\n")
    process = start([sys.executable, script])
    wait_for(lambda: str(script).encode() in command_of(process.pid), "it runs")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT), "it stops")
    process.kill()
    assert process.wait(60) == process.poll() == -signal.SIGKILL
    process.terminate()  # nothing is left
