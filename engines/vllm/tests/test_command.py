"""The flags that `expertd-vllm serve` gives `vllm serve`."""

import subprocess
import sys
from pathlib import Path

import pytest

from expertd_vllm.__main__ import vllm_flags

URL = "http://localhost:8000"
PLUGIN = ["--load-format=expertd", f"--additional-config.expertd.url={URL}"]
GRAPHS = "-cc.cudagraph_mode=PIECEWISE"


@pytest.mark.parametrize(
    ("others", "flags"),
    [
        ([], [*PLUGIN, GRAPHS]),
        (["--port", "8001", "-tp", "2"], [*PLUGIN, GRAPHS, "--port", "8001", "-tp", "2"]),
        (["--additional-config.expertd.name=x"], [*PLUGIN, GRAPHS, "--additional-config.expertd.name=x"]),
        (
            ["--additional-config.expertd.transport=device"],
            [*PLUGIN, "--additional-config.expertd.transport=device"],
        ),
        (["-cc.cudagraph_mode=NONE"], [*PLUGIN, "-cc.cudagraph_mode=NONE"]),
        (["--compilation-config", "{}"], [*PLUGIN, "--compilation-config", "{}"]),
        (["--compilation_config.mode=0"], [*PLUGIN, "--compilation_config.mode=0"]),
    ],
)
def test_flags(others: list[str], flags: list[str]) -> None:
    assert vllm_flags(URL, others) == flags


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["serve", "model"], "the following arguments are required: --expertd"),
        (["serve", "--expertd", URL], "the following arguments are required: model"),
        (
            ["serve", "--port", "8001", "model", "--expertd", URL],
            "expected MODEL right behind it, got --port",
        ),
        (["serve", "model", "--expertd", URL, "--load-format", "auto"], "expected no --load-format"),
        (
            ["serve", "model", "--expertd", URL, "--additional_config={}"],
            "expected no --additional-config (--additional-config.NAME=VALUE works)",
        ),
    ],
)
def test_mistakes(arguments: list[str], text: str) -> None:
    program = Path(sys.executable).with_name("expertd-vllm")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
