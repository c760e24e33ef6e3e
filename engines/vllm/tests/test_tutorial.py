"""The tutorial of docs/vllm.md, as pasted, at other ports and in another folder."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.running import free_port

ROOT = Path(__file__).resolve().parents[3]
TESTED = r"^<!-- tested by engines/vllm/tests/test_tutorial\.py::test_the_tutorial -->\n```\w*\n(.*?)^```$"
SECONDS = 900.0


def test_the_tutorial(tmp_path: Path) -> None:
    expertd, vllm = free_port(), free_port()
    changed = {
        "/tmp/": f"{tmp_path}/", ":8000": f":{expertd}", ":8001": f":{vllm}", "--port 8001": f"--port {vllm}",
        "build/engines-venv/bin/": f"{Path(sys.executable).parent}/",
        ".venv/bin/expertd": os.environ["EXPERTD"], " serve --model": f" serve --port {expertd} --model",
    }  # fmt: skip
    text = (ROOT / "docs" / "vllm.md").read_text()
    serve_experts, serve, chat, answer, count, counted = re.findall(TESTED, text, re.M | re.S)
    with ExitStack() as servers:
        for command, health in (
            (serve_experts, f"http://127.0.0.1:{expertd}/v2/health/ready"),
            (serve, f"http://127.0.0.1:{vllm}/health"),
        ):
            servers.callback(end, start(replaced(command, changed), health, tmp_path / "log"))
        assert run(replaced(chat, changed)) == answer
        until = time.monotonic() + 30  # as steps are counted a bit later
        while (got := run(replaced(count, changed))) != counted and time.monotonic() < until:
            time.sleep(0.1)
        assert got == counted
    # In the form of vLLM's own lines.
    said = r"^\(\w+ pid=\d+\) INFO \S+ \S+ \[engine\.py:\d+\] expertd: calls go over a channel$"
    assert re.search(said, (tmp_path / "log").read_text(), re.M)


def replaced(text: str, changed: dict[str, str]) -> str:
    for old, new in changed.items():
        text = text.replace(old, new)
    return text


def run(command: str) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(command: str, health: str, log: Path) -> "subprocess.Popen[bytes]":
    """Run a command in the background until an address answers, as where vLLM has not run before."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["VLLM_CACHE_ROOT"] = str(log.parent / "vllm")
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["bash", "-e", "-c", command],
            stdout=output, stderr=output, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(health, timeout=60):
            return process
        time.sleep(0.2)
    end(process)
    raise AssertionError(log.read_text()[-5000:])


def end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
