"""The settings and flags that `expertd-sglang serve` gives `sglang serve`."""

import json
import os
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from expertd_sglang.__main__ import main, split

URL = "http://localhost:8000"
FLAGS = ["--disable-shared-experts-fusion", "--cuda-graph-backend-prefill=disabled"]
NO_GRAPHS = "--cuda-graph-backend-decode=disabled"


@pytest.mark.parametrize(
    ("others", "settings", "flags"),
    [
        ([], {}, [*FLAGS, NO_GRAPHS]),
        (["--port", "8001", "--tp=2"], {}, [*FLAGS, NO_GRAPHS, "--port", "8001", "--tp=2"]),
        (["--expertd.transport=device", "--tp=2"], {"transport": "device"}, [*FLAGS, "--tp=2"]),
        (["--expertd.retry_seconds=0.5"], {"retry_seconds": 0.5}, [*FLAGS, NO_GRAPHS]),
        (
            ["--expertd.max_tokens=16", "--expertd.name=3"],
            {"max_tokens": 16, "name": "3"},
            [*FLAGS, NO_GRAPHS],
        ),
    ],
)
def test_flags(others: list[str], settings: dict[str, Any], flags: list[str]) -> None:
    assert split("small", URL, others) == ({"url": URL} | settings, flags)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["serve", "model"], "the following arguments are required: --expertd"),
        (["serve", "--expertd", URL], "the following arguments are required: model"),
        (["serve", "--port", "1", "model", "--expertd", URL], "expected MODEL right behind it, got --port"),
        (
            ["serve", "model", "--expertd", URL, "--expertd.max_tokens=many"],
            "max_tokens: expected .*, got many",
        ),
        (["serve", "model", "--expertd", URL, "--expertd.max_tokens"], "max_tokens: expected .*, got"),
        (["serve", "model", "--expertd", URL, "--expertd.size=3"], "expected url or .*, got size"),
    ],
)
def test_mistakes(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(text, capsys.readouterr().err)


@pytest.mark.parametrize(("plugins", "is_good"), [("", True), ("a, expertd", True), ("a", False)])
def test_sglang_runs_with_them(plugins: str, is_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    module: Any = ModuleType("sglang.cli.main")
    module.main = lambda: ran.append(sys.argv)
    monkeypatch.setitem(sys.modules, "sglang.cli", ModuleType("sglang.cli"))
    monkeypatch.setitem(sys.modules, "sglang.cli.main", module)
    monkeypatch.setattr(sys, "argv", ["expertd-sglang"])
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    monkeypatch.setenv("SGLANG_EXPERTD", "")
    if is_good:
        main(["serve", "small", "--expertd", URL, "--port", "8001"])
        assert ran == [["sglang", "serve", "small", *FLAGS, NO_GRAPHS, "--port", "8001"]]
        assert json.loads(os.environ["SGLANG_EXPERTD"]) == {"url": URL}
    else:
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "small", "--expertd", URL])
        assert ran == []
