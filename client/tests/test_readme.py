"""The examples in README.md run as pasted."""

import re
from pathlib import Path

import pytest

from expertd_client import errors
from tests.expertd import RunningServer
from tests.programs import run

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
CALLS, CHANNELS = README.split("\n## Channels without copies\n")
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
    """Those that run without a GPU."""
    return re.findall(r"^<!-- tested by [^\n]*-->\n```python\n(.*?)^```$", text, re.M | re.S)


def check(server: RunningServer, example: str, output: str) -> None:
    program = example.replace("http://localhost:8000", server.url)
    assert program != example
    assert run(program) == output


@pytest.mark.slow
@pytest.mark.parametrize(("example", "output"), list(zip(examples(CALLS), OUTPUTS, strict=True)))
def test_an_example(server: RunningServer, example: str, output: str) -> None:
    check(server, example, output)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "output"), list(zip(examples(CHANNELS), CHANNEL_OUTPUTS, strict=True)))
def test_an_example_of_channels(server: RunningServer, example: str, output: str) -> None:
    check(server, example, output)


def test_every_exception_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `(\w+Error)`", README, re.M))
    assert listed == {name for name in vars(errors) if name.endswith("Error")}
