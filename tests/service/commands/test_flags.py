"""Flags of all commands: written in full."""

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


def test_defaults_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "new", "--help"])
    assert "(default: infer)" in " ".join(capsys.readouterr().out.split())
