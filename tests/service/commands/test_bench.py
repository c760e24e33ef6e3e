"""`expertd bench` is the client's command."""

import subprocess
import sys
from types import ModuleType

import pytest

from expertd.service.cli import main


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


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "expertd_client", None)
    assert main(["bench", "--url", "http://x"]) == 2
    text = "expertd bench: expertd_client: expected an installed package (pip install ./client), got none\n"
    assert capsys.readouterr().err == text


@pytest.mark.slow
def test_the_clients_command_exists() -> None:
    command = [sys.executable, "-c", "import sys; from expertd.service.cli import main; sys.exit(main())"]
    done = subprocess.run([*command, "bench", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: expertd bench ")
