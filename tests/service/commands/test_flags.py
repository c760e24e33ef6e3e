"""Flags of all commands are written in full; `expertd bench` is the client's command."""

import sys
from types import ModuleType

import pytest

from expertd.service.cli import main


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--conf", "x"],
        ["serve", "--conf", "x"],
        ["layers", "x", "--js"],
        ["kernels", "--js"],
        ["profile", "--step", "1"],
        ["keys", "new", "a", "--right", "infer"],
        ["--versio"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_abbreviated_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "--modle", "x"], "; did you mean --model?"),
        (["serve", "--modle=x"], "; did you mean --model?"),
        (["check", "--log_level", "info"], "; did you mean --log-level?"),
        (["layers", "x", "--jsno"], "; did you mean --json?"),
        (["serve", "--colour", "x"], ""),
    ],
)
def test_a_misspelt_flag_is_recognized(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    flag = next(word for word in arguments if word.startswith("--")).partition("=")[0]
    assert caught.value.code == 2
    expected = f"expertd {arguments[0]}: error: unrecognized argument: '{flag}'{hint}\n"
    assert capsys.readouterr().err.endswith(expected)


def test_defaults_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "new", "--help"])
    assert "(default: infer)" in " ".join(capsys.readouterr().out.split())


def test_it_runs_the_clients_command_with_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[list[str], str]] = []

    def client_main(argv: list[str], prog: str) -> int:
        called.append((argv, prog))
        return 7

    program = ModuleType("expertd_client.__main__")
    program.main = client_main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expertd_client", ModuleType("expertd_client"))
    monkeypatch.setitem(sys.modules, "expertd_client.__main__", program)
    assert main(["bench", "--url", "http://x", "--tokens=1,8", "-h"]) == 7
    assert called == [(["bench", "--url", "http://x", "--tokens=1,8", "-h"], "expertd")]
