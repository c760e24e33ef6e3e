"""The examples in README.md run as pasted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from expertd_client import errors
from tests.expertd import RunningServer

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
OUTPUTS = (
    "(5, 512) (5, 512)\n",
    "[(16, 512), (16, 512), (16, 512), (16, 512)] torch.bfloat16\n",
    "True\n",
    "(16, 512) float32 True\n" * 2,
    "(16, 512) float32\n" * 2,
)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "output"), list(zip(EXAMPLES, OUTPUTS, strict=True)))
def test_an_example(sharing_server: RunningServer, example: str, output: str) -> None:
    program = example.replace("http://localhost:8000", sharing_server.url)
    assert program != example
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (output, "")


def test_every_exception_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `(\w+Error)`", README, re.M))
    assert listed == {name for name in vars(errors) if name.endswith("Error")}
