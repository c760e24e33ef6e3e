"""The examples in README.md run as pasted."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd_client import errors
from tests.expertd import RunningServer, running_server

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
CALLS, CHANNELS = README.split("\n## Channels without copies\n")
COMMAND = re.compile(r"^\.venv/bin/expertd serve --config configs/demo\.yaml((?: --set \S+)*)$", re.M)
OUTPUTS = (
    "(5, 512) (5, 512)\n",
    "[(16, 512), (16, 512), (16, 512), (16, 512)] torch.bfloat16\n",
    "(4, 512)\n",
    "True\n",
)
CHANNEL_OUTPUTS = (
    "(16, 512) float32 True\n" * 2,
    "(16, 512) float32\n" * 2,
)


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def check(server: RunningServer, example: str, output: str) -> None:
    program = example.replace("http://localhost:8000", server.url)
    assert program != example
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (output, "")


@pytest.fixture(scope="module")
def channel_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With the settings of the command that stands before the examples of channels."""
    before, _, _ = CHANNELS.partition("```python")
    (settings,) = COMMAND.findall(before)
    directory = tmp_path_factory.mktemp("readme")
    own = settings.replace("/tmp/", f"{directory}/")
    with running_server(directory, *own.replace("--set", "").split()) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(("example", "output"), list(zip(examples(CALLS), OUTPUTS, strict=True)))
def test_an_example(server: RunningServer, example: str, output: str) -> None:
    check(server, example, output)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "output"), list(zip(examples(CHANNELS), CHANNEL_OUTPUTS, strict=True)))
def test_an_example_of_channels(channel_server: RunningServer, example: str, output: str) -> None:
    check(channel_server, example, output)


def test_every_exception_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `(\w+Error)`", README, re.M))
    assert listed == {name for name in vars(errors) if name.endswith("Error")}
