"""The documents' examples run as pasted."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd.service.settings.loader import load_settings
from tests.paths import DEMO, ROOT
from tests.service.processes import ServerProcess, server_process, serving

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(load_settings(DEMO), tmp_path_factory.mktemp("server")) as process:
        yield process


def block(document: str, language: str, word: str) -> str:
    """The only code block of `document` in `language` that contains `word`."""
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)
    (found,) = [text for text in blocks if word in text]
    return found


def asking(server: ServerProcess, text: str) -> str:
    """`text` with this server's port."""
    assert "localhost:8000" in text
    return text.replace("localhost:8000", server.url)


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@needs_curl
@pytest.mark.slow
def test_the_curl_request(server: ServerProcess) -> None:
    answer = run("bash", "-c", asking(server, block("README.md", "sh", "/infer")))
    assert answer.startswith('{"model_name":"demo","model_version":"1","outputs":[{"name":"hidden_states"')
    assert answer.count(",") > 512


@pytest.mark.slow
def test_the_python_request(server: ServerProcess) -> None:
    answer = run(sys.executable, "-c", asking(server, block("README.md", "python", "tritonclient")))
    assert answer.startswith("(5, 512)\n[[")


@needs_curl
@pytest.mark.slow
def test_the_partitions_request_is_understood(server: ServerProcess) -> None:
    answer = run("bash", "-c", asking(server, block("README.md", "sh", "/v1/partitions")))
    assert (
        answer
        == '{"error": "partitions: expected a backend whose device has SMs to partition, got \'reference\'"}'
    )


@pytest.mark.slow
def test_the_kernels_example() -> None:
    example = block("kernels/README.md", "python", "grouped_gemm_contiguous")
    assert run(sys.executable, "-c", f"{example}\nprint(out.shape)") == "torch.Size([300, 256])\n"


@needs_curl
@pytest.mark.slow
def test_the_small_checkpoint_of_the_documentation(tmp_path: Path) -> None:
    text = block("docs/checkpoints.md", "sh", "benchmarks.make_checkpoint")
    make, serve = text.replace("/tmp/small", str(tmp_path / "small")).splitlines()
    made = subprocess.run(
        [sys.executable, *shlex.split(make)[1:]], cwd=ROOT, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr
    program, command, *arguments = shlex.split(serve)
    assert (program, command) == (".venv/bin/expertd", "serve")
    with serving(arguments, tmp_path) as server:
        assert server.get("/v2/models/small-deepseek-v3.layers.2/ready").status_code == 200
        answer = run("bash", "-c", asking(server, block("docs/checkpoints.md", "sh", "/infer")))
    assert answer.startswith(
        '{"model_name":"small-deepseek-v3.layers.1","model_version":"1","outputs":[{"name":'
    )
