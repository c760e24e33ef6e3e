"""docs/settings.md lists every setting as defined in the code, and its examples work."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from expertd.service.cli import main
from expertd.service.settings.model import Settings
from expertd.service.settings.schema import is_setting, model_at
from expertd.service.settings.table import in_chart, replaced
from expertd.service.settings.table import main as write_table
from tests.paths import ROOT

DOCUMENT = ROOT / "docs" / "settings.md"
CHART = ROOT / "deploy" / "helm" / "expertd" / "values.schema.json"


def leaves(model: type[BaseModel], key: tuple[str, ...] = ()) -> Iterator[str]:
    """Every setting, found independently of the table's code."""
    for name in model.model_fields:
        here, entry = (*key, name), (*key, name, "0")
        if (within := model_at(here)) is not None:
            yield from leaves(within, here)
            continue
        yield ".".join(here)
        if (within := model_at(entry)) is not None:
            yield from leaves(within, entry)


def test_the_table_matches_the_code() -> None:
    text = DOCUMENT.read_text()
    assert replaced(text) == text, "python -m expertd.service.settings.table docs/settings.md"


def test_the_charts_schema_matches_the_code() -> None:
    text = CHART.read_text()
    assert in_chart(text) == text, f"python -m expertd.service.settings.table {CHART}"


def test_every_setting_has_a_row_with_a_meaning() -> None:
    lines = re.findall(
        r"^\| `([\w.]+)` \| (.+) \| (.+) \| (.*) \|$", replaced("<!-- settings -->\n<!-- /settings -->"), re.M
    )
    assert [name.replace(".N", ".0") for name, *_ in lines] == list(leaves(Settings))
    assert [name for name, *_, meaning in lines if not meaning] == []
    for name, *_ in lines:
        assert is_setting(tuple(name.replace(".N", ".0").split(".")))


def test_an_outdated_table_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "settings.md"
    document.write_text(DOCUMENT.read_text().replace("`8000`", "`8001`"))
    monkeypatch.setattr(sys, "argv", ["table", str(document), "--check"])
    assert write_table() == 1
    assert "expected the table that `python -m" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["table", str(document)])
    assert write_table() == 0
    assert document.read_text() == DOCUMENT.read_text()
    with pytest.raises(ValueError, match="expected <!-- settings -->"):
        replaced("nothing")


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if "/models/" not in line]


@pytest.mark.parametrize("command", commands())
def test_the_examples_are_valid_settings(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    program, _, *arguments = words
    assert program == "expertd"
    main(["check", *arguments])
    out = capsys.readouterr().out
    assert re.search(r"^settings +ok$", out, re.M), out
    if "max_batch_tokens" in command:
        assert re.search(r"^limits\.max_batch_tokens +8192 ", out, re.M)


def test_the_yaml_example_is_the_same_setting() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    assert yaml.safe_load(example) == {"limits": {"max_batch_tokens": 8192}}


def test_help_lists_the_flags_and_points_to_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    flags = "--set --config --model --layers --host --port --uds --backend --log-level"
    assert [flag for flag in flags.split() if flag not in text] == []
    assert "docs/settings.md" in text
