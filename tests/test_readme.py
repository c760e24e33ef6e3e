"""The documents' examples run as pasted."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from examples.in_process import load_layers
from examples.small_model import Sizes, make_checkpoint
from expertd.kernels import resolve_backend
from expertd.service.settings.loader import load_settings
from expertd.service.settings.parts import GrpcSettings
from tests.families import quiet_transformers
from tests.paths import DEMO, ROOT
from tests.service.processes import ServerProcess, expertd, grpc_address, server_process, serving
from tests.service.waiting import wait_for

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = load_settings(DEMO).model_copy(update={"grpc": GrpcSettings(port=0)})
    with server_process(settings, tmp_path_factory.mktemp("server")) as process:
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
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
    answer = run(sys.executable, "-c", asking(server, block("docs/http.md", "python", "tritonclient.http")))
    assert answer.startswith("(5, 512)\n[[")


@pytest.mark.slow
def test_the_grpc_request(server: ServerProcess) -> None:
    text = block("docs/http.md", "python", "tritonclient.grpc")
    assert run(sys.executable, "-c", text.replace("localhost:8001", grpc_address(server))) == "(5, 512)\n"


@needs_curl
@pytest.mark.slow
def test_the_partitions_request_is_understood(server: ServerProcess) -> None:
    answer = run("bash", "-c", asking(server, block("docs/operating.md", "sh", "/v1/partitions")))
    taken = resolve_backend("auto", "cpu").name
    expected = "partitions: expected a backend whose device has SMs to partition"
    assert answer == f'{{"error": "{expected}, got {taken!r}"}}'


@needs_curl
@pytest.mark.slow
def test_the_pages_events(server: ServerProcess) -> None:
    lines = run("bash", "-c", asking(server, block("docs/monitoring.md", "sh", "/v1/live"))).splitlines()
    assert lines[::3] == ["event: server", "event: snapshot", "event: snapshot"]


@pytest.mark.slow
def test_the_routing_of_tokens(server: ServerProcess) -> None:
    answer = run(sys.executable, "-c", asking(server, block("docs/monitoring.md", "python", "routing")))
    ids, weights = answer.strip()[1:-1].split("] [[")
    assert [len(row.split(",")) for text in (ids, weights) for row in text.split("], [")] == [4] * 6


@pytest.mark.slow
def test_a_caller_shows_its_pools() -> None:
    text = block("docs/pool.md", "python", "expose()")
    listens = "prometheus_client.start_http_server(9000)"
    assert listens in text
    program = text.replace(listens, "server, _ = prometheus_client.start_http_server(0, '127.0.0.1')")
    program += """
from urllib.request import urlopen
from expertd_client import ExpertClient

client = ExpertClient(["http://experts-0:8000"])
print(urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode())
"""
    shown = 'expertd_pool_servers{server="http://experts-0:8000",state="up"} 1.0'
    assert shown in run(sys.executable, "-c", program).splitlines()


@needs_curl
@pytest.mark.slow
def test_two_ranks_on_a_laptop(tmp_path: Path) -> None:
    documented = (ROOT / "docs" / "ranks.md").read_text()
    (printed,) = re.findall(r"^```\n(expertd_rank_up.*?)^```$", documented, re.M | re.S)
    arguments = shlex.split(block("docs/ranks.md", "sh", "--ranks 2"))
    assert arguments[:2] == [".venv/bin/expertd", "serve"]
    assert load_settings(ROOT / "configs" / "demo-2ranks.yaml").models == load_settings(DEMO).models
    with serving(arguments[2:], tmp_path) as server:
        run("bash", "-c", asking(server, block("README.md", "sh", "/infer")))
        metrics = asking(server, block("docs/ranks.md", "sh", "expertd_rank_"))
        wait_for(lambda: run("bash", "-c", metrics) == printed, "the step is counted")


@needs_curl
@pytest.mark.slow
def test_the_commands_that_make_keys(tmp_path: Path) -> None:
    new, other, serve, ask = block("docs/access.md", "sh", "expertd keys new").splitlines()
    made = [expertd(*shlex.split(command.partition(">>")[0])[1:]) for command in (new, other)]
    (tmp_path / "keys.yaml").write_text("".join(done.stdout for done in made))
    (key,) = re.findall(r": (\S{40,})$", made[0].stderr, re.M)
    arguments = shlex.split(serve.replace("keys.yaml", f"{tmp_path}/keys.yaml"))
    assert arguments[:2] == ["expertd", "serve"]
    with serving(arguments[2:], tmp_path) as server:
        asked = ask.replace("127.0.0.1:8000", server.url).replace("curl", f"export KEY={key}; curl -sS")
        assert json.loads(run("bash", "-c", asked))["name"] == "expertd"
        assert server.get("/v2").status_code == 401


@pytest.mark.slow
@pytest.mark.thorough
def test_the_kernels_example() -> None:
    example = block("kernels/README.md", "python", "grouped_gemm_contiguous")
    assert run(sys.executable, "-c", f"{example}\nprint(out.shape)") == "torch.Size([300, 256])\n"


@needs_curl
@pytest.mark.slow
@pytest.mark.thorough
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
        ask = block("README.md", "sh", "/infer").replace("demo", "small-deepseek-v3.layers.1")
        answer = run("bash", "-c", asking(server, ask.replace("511", "255").replace("512", "256")))
    assert answer.startswith(
        '{"model_name":"small-deepseek-v3.layers.1","model_version":"1","outputs":[{"name":'
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_servers_that_hold_half_of_the_experts_each(tmp_path: Path) -> None:
    with quiet_transformers():
        make_checkpoint(tmp_path / "small", "qwen3_moe", Sizes(1), torch.float32, "cpu")
    commands = block("examples/README.md", "sh", "--experts").replace("/tmp/small", f"{tmp_path}/small")
    program = block("examples/README.md", "python", "ExpertClient(URLS)")
    with ExitStack() as running:

        def server_of(number: int, arguments: list[str]) -> str:
            (directory := tmp_path / str(number)).mkdir()
            return running.enter_context(serving(arguments, directory)).url

        given = [shlex.split(command) for command in commands.splitlines()]
        assert [command[:2] for command in given] == [[".venv/bin/expertd", "serve"]] * 2
        ports = [command[-1] for command in given]
        urls = [server_of(number, command[2:-2]) for number, command in enumerate(given)]
        for port, url in zip(ports, urls, strict=True):
            program = program.replace(f"localhost:{port}", url)
        assert re.search(r'"http://127', program), "its servers were replaced"
        halves = run(sys.executable, "-c", program)
        alone = program.replace("ExpertClient(URLS)", "ExpertClient(URLS[0])")
        first = run(sys.executable, "-c", alone)
    whole = load_layers(tmp_path / "small", "cpu")["small.layers.0"](10 * torch.eye(5, 256)[None])[0, :, 0]
    assert halves.startswith("(5, 256) [")
    np.testing.assert_allclose(numbers(halves), whole.numpy(), rtol=0.02, atol=1e-3)
    assert np.abs(numbers(first) - whole.numpy()).max() > 0.01, "each half computes a part"


def numbers(printed: str) -> npt.NDArray[np.float64]:
    return np.array(printed.partition("[")[2].strip(" ]\n").split(), np.float64)
