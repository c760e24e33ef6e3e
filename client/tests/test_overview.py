"""`expertd-client pool`: real servers on one screen."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd_client import ExpertClient
from expertd_client.__main__ import main
from expertd_client.overview import Seen, Totals, row_of, table_of
from tests.expertd import HIDDEN, LAYER, MODEL, channels_in, running_server


def shown(*arguments: str) -> list[dict[str, Any]]:
    """The objects that the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "expertd_client", "pool", "--json", *arguments],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_what_servers_have_and_do(tmp_path: Path) -> None:
    """One with half of the experts that is called, one that nobody calls, and one that is not there."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    half = LAYER | {"local_experts": "0-7"}
    with (
        running_server(folders[0], channels_in(folders[0]), layers=[half]) as one,
        running_server(folders[1], layers=[LAYER | {"load": False}]) as two,
        ExpertClient(one.url, transport="channel") as client,
    ):
        program = f"""
import threading, numpy as np
from expertd_client import ExpertClient
client = ExpertClient({one.url!r}, transport="channel")
print("calls", flush=True)
while True:
    client.infer({MODEL!r}, np.ones((5, {HIDDEN}), np.float32))
"""
        client.infer(MODEL, np.ones((5, HIDDEN), np.float32))
        calling = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        with calling:
            assert calling.stdout is not None
            calling.stdout.readline()
            looks = shown(one.url, two.url, "http://127.0.0.1:9", "--count", "3", "--interval", "0.5")
            calling.kill()
    assert len(looks) == 3
    first, *_, last = ({row["server"]: row for row in look["servers"]} for look in looks)
    assert list(last) == [one.url, two.url, "http://127.0.0.1:9"]
    assert first[one.url]["tokens/s"] is None
    row = last[one.url]
    assert (row["state"], row["layers"], row["experts"]) == ("ready", "1 of 1", "0-7")
    assert row["tokens/s"] > 0
    assert row["steps/s"] > 0
    assert 0 < row["in steps"] <= 1.5  # a step is counted when it ends
    assert row["queue ms"] >= 0
    assert sorted(row["callers"].values()) == [1, 1]
    assert last[two.url]["layers"] == "0 of 1"
    assert last[two.url]["tokens/s"] == 0
    assert last["http://127.0.0.1:9"]["state"].startswith("down: ")


def test_rows_have_rates() -> None:
    seconds, tokens = random.uniform(0.5, 3), random.randint(1, 10**6)
    before = Seen("http://a", 10.0, layers=3, ready_layers=2, experts="all", totals=Totals(5, 6, 7.0, 8, 9.0))
    after = Totals(5 + tokens, 6 + 20, 7.0 + seconds / 2, 8 + 40, 9.0 + 0.2)
    seen = Seen("http://a", 10.0 + seconds, layers=3, ready_layers=2, experts="all", totals=after)
    row = row_of(seen, before)
    assert row["tokens/s"] == pytest.approx(tokens / seconds)
    assert row["steps/s"] == pytest.approx(20 / seconds)
    assert row["queue ms"] == pytest.approx(5.0)
    assert row["in steps"] == pytest.approx(0.5)
    assert row_of(before, seen)["tokens/s"] is None  # it has begun anew since


def test_a_table_has_columns() -> None:
    rows = [
        row_of(Seen("http://a-long-name:8000", 0.0, "down: gone"), None),
        row_of(Seen("http://b", 0.0, layers=2, ready_layers=1, experts="0-3", callers={7: 2, 8: 1}), None),
    ]
    lines = table_of(rows).splitlines()
    assert [line.index(text) for line, text in zip(lines, ("state", "down", "ready"), strict=True)] == [
        25
    ] * 3
    assert lines[2].endswith("3 channels of 2 processes")


@pytest.mark.parametrize("later", [None, "", "ftp://a"])
def test_a_list_that_is_lost_for_a_while(
    later: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The servers of before are shown."""
    file = tmp_path / "servers"
    file.write_text("unix:/nowhere")

    async def spoil(seconds: float) -> None:
        file.unlink() if later is None else file.write_text(later)

    monkeypatch.setattr("expertd_client.overview.asyncio.sleep", spoil)
    assert main(["pool", "--json", "--count", "2", f"file:{file}"]) == 0
    looks = [json.loads(line)["servers"] for line in capsys.readouterr().out.splitlines()]
    assert [[row["server"] for row in rows] for rows in looks] == [["unix:/nowhere"]] * 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["http://a", "--interval", "0"], "--interval: expected a positive number, got 0.0"),
        (["http://a", "--count", "0"], "--count: expected at least 1, got 0"),
        (["ftp://a", "--count", "1"], "url: expected http://host:port"),
        (["file:/nowhere/servers", "--count", "1"], "No such file"),
    ],
)
def test_what_cannot_be_shown(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", *arguments]) == 2
    out = capsys.readouterr()
    assert text in out.err
    assert out.err.startswith("expertd-client pool: ")
