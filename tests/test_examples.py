"""The examples run on a CPU as documented, and notice what is wrong."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples import remote_experts
from examples.afd import attention
from examples.remote_experts import PROMPT, RemoteExperts, Traffic, difference, load_model
from examples.small_model import FAMILIES, Sizes, make_checkpoint
from expertd_client import ExpertClient
from tests.families import quiet_transformers
from tests.paths import ROOT
from tests.service.checkpoints.builders import edit_tensors
from tests.service.processes import ServerProcess, serving

pytestmark = pytest.mark.thorough

LAYERS, NEW_TOKENS = 2, 8


@pytest.fixture(autouse=True)
def own_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a server's settings from outside, nor the examples' number of threads for other tests."""
    for name in [name for name in os.environ if name.startswith("EXPERTD_")]:
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "model"
    with quiet_transformers():
        make_checkpoint(directory, "deepseek_v3", Sizes(LAYERS), torch.float32, "cpu")
    return directory


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(["--model", checkpoint, "--layers", "all"], tmp_path_factory.mktemp("server")) as process:
        yield process


def run(*arguments: str | Path) -> int:
    with quiet_transformers():
        return remote_experts.main([str(argument) for argument in arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "size"), [("qwen3_moe", "float32", 4), ("deepseek_v3", "bfloat16", 2)]
)
def test_a_family_writes_the_text_of_its_experts_in_process(
    family: str, dtype: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--layers", str(LAYERS), "--new-tokens", str(NEW_TOKENS))
    assert run("--family", family, "--dtype", dtype, "--compare", *sizes) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("experts at http://127.0.0.1:")
    assert repr(PROMPT)[:-1] in first
    num_bytes = (len(PROMPT) + NEW_TOKENS - 1) * Sizes.hidden_size * size * 2 * LAYERS
    expected = f"tokens/s, {LAYERS * NEW_TOKENS} calls, {num_bytes / 1e6:.2f} MB of hidden states"
    assert second.endswith(expected)
    assert third.startswith("experts in this process: the same text, logits differ by 0.")


@pytest.mark.slow
def test_every_block_is_answered_by_its_own_layer(server: ServerProcess, checkpoint: Path) -> None:
    """Beside transformers' own blocks, whose weights are not rounded to FP8."""
    ids, traffic = torch.arange(64)[None], Traffic()
    with quiet_transformers(), ExpertClient(f"http://{server.url}") as client:
        remote = load_model(checkpoint, "cpu", lambda name: RemoteExperts(client, name, traffic))
        whole = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        assert difference(remote, whole, ids) < 0.3
        assert traffic == Traffic(LAYERS, LAYERS * 2 * 64 * Sizes.hidden_size * 4)
        remote.model.layers[1].mlp, remote.model.layers[2].mlp = (
            remote.model.layers[2].mlp,
            remote.model.layers[1].mlp,
        )
        assert difference(remote, whole, ids) > 0.6


@pytest.mark.slow
def test_a_comparison_with_other_weights_fails(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, other)
    name = "model.layers.2.mlp.shared_experts.down_proj.weight"
    edit_tensors(other / "model.safetensors", **{name: -load_file(checkpoint / "model.safetensors")[name]})
    arguments = ("--url", f"http://{server.url}", "--compare", "--new-tokens", "2", "--checkpoint")
    assert run(*arguments, checkpoint) == 0
    assert "the same text" in capsys.readouterr().out
    assert run(*arguments, other) == 1
    assert "(at most 0.5% expected)" in capsys.readouterr().out


@pytest.mark.slow
def test_what_the_server_says_is_reported(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "unknown")
    assert run("--url", f"http://{server.url}", "--checkpoint", tmp_path / "unknown") == 2
    assert "unknown.layers.1" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run("--checkpoint", tmp_path / "empty") == 2
    assert "expertd serve: expected a ready server, got: expertd: " in capsys.readouterr().err


def test_the_documented_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = (ROOT / "examples" / "README.md").read_text().replace("\\\n", "")
    commands = [
        (program, shlex.split(arguments, comments=True))
        for program, arguments in re.findall(r"^\.venv/bin/python -m examples\.(\S+)(.*)$", text, re.M)
    ]
    parsers = {"remote_experts": remote_experts.parse, "afd.attention": attention.parse}
    parsed = [parsers[program](arguments) for program, arguments in commands if program in parsers]
    assert len(parsed) == 6
    tutorials = {"qwen3_experts", "two_lanes", "hot_expert"}  # tests/test_blocks.py runs them
    assert {program for program, _ in commands} == {*parsers, "afd.timeline", *tutorials}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--url", "http://localhost:1"),
            "--url: expected --checkpoint, the directory that it serves, too, got",
        ),
        (("--prompt", ""), "--prompt: expected at least one character, got none"),
        (("--new-tokens", "0"), "--new-tokens: expected a number of at least 1, got 0"),
        (("--device", "tpu"), "--device: expected one of cpu"),
        (("--hidden-size", "384"), "--hidden-size: expected a multiple of 256, got 384"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_the_gpu(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "cuda", "--family", family, "--compare", "--new-tokens", "16") == 0
    assert "the same text" in capsys.readouterr().out
