"""`expertd keys new`, and a server's refusal of a file that cannot be used."""

import json
import subprocess
from pathlib import Path

import pytest

from expertd.service.cli import main
from expertd.service.settings.keys import load_keys
from tests.paths import DEMO
from tests.service.processes import EXPERTD

Output = pytest.CaptureFixture[str]


def test_new_keys_can_be_appended_to_the_file(tmp_path: Path, capsys: Output) -> None:
    path, secrets = tmp_path / "keys.yaml", {}
    with path.open("a") as file:
        for name, rights in (("ci", "infer"), ("ops", "admin, metrics")):
            assert main(["keys", "new", name, "--rights", rights]) == 0
            captured = capsys.readouterr()
            secrets[name] = captured.err.rpartition(": ")[2].strip()
            assert secrets[name] not in captured.out
            file.write(captured.out)
    keys = load_keys(path)
    assert [(key.name, key.rights) for key in keys.keys] == [
        ("ci", ("infer",)),
        ("ops", ("admin", "metrics")),
    ]
    for name, secret in secrets.items():
        assert len(secret) == 43, "256 bits"
        found = keys.find(secret.encode())
        assert found is not None
        assert found.name == name


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["a b"], "name: expected 1 to 64 letters, digits, '.', '_' or '-', got another text"),
        (["a", "--rights", "root"], "rights: expected infer, admin and metrics, or some of them, got 'root'"),
        (
            ["a", "--rights", "infer,foo,"],
            "rights: expected infer, admin and metrics, or some of them, got 'foo' and ''",
        ),
    ],
)
def test_wrong_names_and_rights_make_no_key(arguments: list[str], mistake: str, capsys: Output) -> None:
    assert main(["keys", "new", *arguments]) == 2
    assert capsys.readouterr() == ("", f"expertd keys: {mistake}\n")


def test_a_reader_of_the_output_may_end_first() -> None:
    """As `head` does."""
    command: list[str | Path] = [EXPERTD, "keys", "new", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 1
        (line,) = process.stderr.read().splitlines()
    assert line.startswith("key, shown only now: ")


def test_an_output_that_cannot_be_written_is_a_sentence() -> None:
    command: list[str | Path] = [EXPERTD, "keys", "new", "a"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    text = "expertd: expected to write the output, got an error: No space left on device"
    assert done.stderr.splitlines()[1:] == [text]


def test_a_closed_output_is_no_error() -> None:
    command = f'exec "{EXPERTD}" keys new a >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_file_that_cannot_be_used_is_refused_at_start(command: str, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: a, rights: [infer]}\n- a\n")
    assert main([command, "--config", str(DEMO), "--port", "0", "--keys", str(path)]) == 2
    said = "".join(capsys.readouterr())
    for mistake in (
        f"keys: {path}: 0.sha256: expected 64 hexadecimal digits in lower case, got none",
        f"keys: {path}: 1: expected name, sha256 and rights, got another text",
    ):
        assert mistake in said


def test_check_says_how_many_keys_there_are(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("[]")
    assert main(["check", "--config", str(DEMO), "--port", "0", "--keys", str(path)]) == 0
    assert f"0 in {path}" in capsys.readouterr().out


def test_only_the_node_with_the_front_end_needs_the_file(tmp_path: Path, capsys: Output) -> None:
    given = ["--config", str(DEMO), "--keys", str(tmp_path / "none"), "--nnodes", "2"]
    for node, code, detail in (("0", 2, "cannot be read"), ("1", 0, "none: node 0 has the front end")):
        nodes = ["--rendezvous", "127.0.0.1:29512", "--node-rank", node]
        assert main(["check", "--json", "--port", "0", *given, *nodes]) == code
        checks = json.loads(capsys.readouterr().out)["checks"]
        (found,) = [check["detail"] for check in checks if check["name"] == "keys"]
        assert detail in found
