"""`expertd profile`: what it writes and prints, and what it refuses before it loads anything."""

import json
import re
from pathlib import Path

import pytest
import yaml

from expertd.service.cli import main
from tests.service.apps import tiny_settings
from tests.service.forking import import_first
from tests.service.full import REASONS, break_temporary_files
from tests.service.processes import expertd

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def profiler() -> None:
    """Imported before the forks: it takes each process seconds."""
    import_first("torch.profiler", "torch._inductor.config")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    settings = tiny_settings().model_dump(mode="json", exclude_defaults=True)
    other = {**settings["models"][0], "name": "other", "load": False}
    path.write_text(yaml.safe_dump({**settings, "models": [*settings["models"], other]}))
    return path


@pytest.mark.slow
def test_it_writes_a_trace_and_says_so(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    options = ["--served-model", "other", "--steps", "3", "--tokens", "5"]
    result = expertd("profile", "--config", config, *options, "--output", file)
    assert result.returncode == 0, result.stderr
    line = rf"{re.escape(str(file))}: 3 steps of other in 0\.\d+ s \(tokens per step: 5\), (\d+) bytes\n"
    found = re.fullmatch(line, result.stdout)
    assert found is not None, result.stdout
    assert int(found[1]) == file.stat().st_size
    assert json.loads(file.read_text())["expertd"]["steps"] == 3
    assert "loading model other" in result.stderr
    assert "loading model tiny" not in result.stderr


@pytest.mark.slow
def test_ranks_are_recorded_too(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    options = ["--served-model", "tiny", "--steps", "3", "--ranks", "2", "--set", "models.1.load=true"]
    result = expertd("profile", "--config", config, *options, "--output", file)
    assert result.returncode == 0, result.stderr
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"front end: CPU", "rank 0: CPU", "rank 1: CPU"}


@pytest.mark.slow
def test_what_does_not_load_is_reported(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    options = ["--served-model", "tiny", "--set", "partitions={compute: 8}"]
    result = expertd("profile", "--config", config, *options, "--output", file)
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        "partitions: expected a backend whose device has SMs to partition, got 'reference'" in result.stderr
    )
    last = "expertd profile: model tiny: expected it to load, got an error (the server is failed)"
    assert result.stderr.splitlines()[-1] == last
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--served-model: expected tiny or other, got none"),
        (["--served-model", "tin"], "--served-model: expected tiny or other, got 'tin'"),
        (["--steps", "0"], "--steps: expected 1 to 256, got 0"),
        (["--steps", "257"], "--steps: expected 1 to 256, got 257"),
        (["--tokens", "0"], "--tokens: expected 1 to limits.max_request_tokens (64), got 0"),
        (["--tokens", "65"], "--tokens: expected 1 to limits.max_request_tokens (64), got 65"),
        (["--seconds", "0"], "--seconds: expected more than 0, at most 60, got 0"),
        (["--seconds", "61"], "--seconds: expected more than 0, at most 60, got 61"),
        (["--seconds", "nan"], "--seconds: expected more than 0, at most 60, got nan"),
        (
            ["--nnodes", "2", "--rendezvous", "127.0.0.1:9", "--set", "models.1.load=true"],
            "nnodes: expected one, got 2",
        ),
        (["--output", "/"], "--output: expected a file in a directory that exists, got /"),
        (["-o", "/no/f"], "--output: expected a file in a directory that exists, got /no/f"),
        (
            ["-o", "/proc/f"],
            "--output: expected a file that can be written to, got /proc/f: No such file or directory",
        ),
    ],
)
def test_wrong_options_are_refused(config: Path, capsys: Output, options: list[str], text: str) -> None:
    named = ["--served-model", "tiny"] if options and "--served-model" not in options else []
    assert main(["profile", "--config", str(config), *named, *options]) == 2
    assert capsys.readouterr() == ("", f"expertd profile: {text}\n")


@pytest.mark.parametrize("kind", REASONS)
def test_a_trace_needs_a_temporary_folder(
    kind: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Which is found before a layer is loaded."""
    tried = break_temporary_files(monkeypatch, kind, tmp_path)
    file = tmp_path / "steps.json"
    options = ["--config", str(config), "--served-model", "tiny", "--output", str(file)]
    with monkeypatch.context() as patched:
        patched.setattr("expertd.service.commands.profile.check_writable", lambda *_: None)
        assert main(["profile", *options]) == 2
    expected = "trace: expected a folder for temporary files (TMPDIR) that can be written to"
    assert capsys.readouterr().err == f"expertd profile: {expected}, got {tried}: {REASONS[kind]}\n"
    assert not file.exists()


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_an_error(config: Path) -> None:
    result = expertd("profile", "--config", config, "--served-model", "tiny", "-o", "/dev/full")
    assert result.returncode == 1
    text = "--output: expected a file that can be written to, got /dev/full: No space left on device"
    assert result.stderr.splitlines()[-1] == f"expertd profile: {text}"
