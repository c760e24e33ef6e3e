"""`benchmarks.lanes`: its ways are settings of a server, it keeps rows by what they measure, and it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import lanes
from benchmarks.lanes_ways import ALONE, LAYERS, SPLITS, Way, settings_of, ways
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.model import Settings
from tests.paths import ROOT
from tests.service.processes import clean_environment


@pytest.mark.parametrize("name", LAYERS)
def test_every_way_is_a_servers_settings(tmp_path: Path, name: str) -> None:
    layer = LAYERS[name]
    for way in ways(layer, SPLITS):
        settings = Settings.model_validate(settings_of(layer, way, tmp_path))
        assert settings.limits.join_chunks == way.joins
        assert settings.limits.prefill_chunk_tokens == way.chunk
        assert len(lanes_of(settings)) == (2 if way.lanes else 1)
        assert bool(settings.partitions) == (way.split is not None)


def test_ways_of_one_server_follow_each_other(tmp_path: Path) -> None:
    layer = LAYERS["deepseek-v3"]
    seen = [settings_of(layer, way, tmp_path) for way in ways(layer, SPLITS)]
    servers = [settings for before, settings in zip([{}, *seen], seen, strict=False) if settings != before]
    assert len(servers) == len({json.dumps(settings) for settings in seen})
    assert seen[0] == settings_of(layer, ALONE, tmp_path), "what runs alone needs no server more"


def test_rows_are_replaced_and_shown() -> None:
    rows: list[lanes.Row] = []
    way = Way("turns")
    for number in (1.0, 2.0):
        lanes.put(rows, lanes.row_of("tiny", way, 8, [number * 1e-3] * 3, 50.0, 100.0))
    lanes.put(rows, lanes.row_of("tiny", ALONE, 0, [], 100.0, 100.0))
    assert lanes.shown(rows, "tiny").splitlines()[2:] == [
        "| turns | 8 | 3 | 2000 | 2000 | 0.50 |",
        "| alone | none | 0 |  |  | 1.00 |",
    ]


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "lanes.json"
    command = [sys.executable, "-m", "benchmarks.lanes", "--layers", "tiny", "--json", str(file)]
    options = ["--tokens", "1", "--seconds", "0.3", "--ways", "turns", "lanes"]
    ran = subprocess.run(
        [*command, *options], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["way"] for row in rows] == [
        "alone", "alone", "turns", "turns, chunks of 64", "lanes on all SMs",
    ]  # fmt: skip
    assert all(row["prefill_tokens_per_second"] for row in rows[1:])
    assert all(row["steps"] for row in rows if row["decode_tokens"])
