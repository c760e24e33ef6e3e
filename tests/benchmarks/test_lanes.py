"""`benchmarks lanes`: its ways are settings of a server, it keeps rows by what they measure, and it runs."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.serving import lanes
from benchmarks.serving.lanes import LAYERS, SPLITS, settings_of, ways
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.loader import load_settings
from expertd.service.settings.model import Settings
from tests.service.settings.refusals import MODEL


@pytest.mark.parametrize("name", LAYERS)
def test_every_way_is_a_servers_settings(tmp_path: Path, name: str) -> None:
    layer = LAYERS[name]
    for way in ways(layer, SPLITS):
        settings = Settings.model_validate(settings_of(layer, way, tmp_path))
        assert settings.limits.join_chunks == way.joins
        assert settings.limits.prefill_chunk_tokens == way.chunk
        assert len(lanes_of(settings)) == (2 if way.lanes else 1)
        assert bool(settings.partitions) == (way.split is not None)


@pytest.mark.parametrize(
    ("target_ms", "split"),
    [
        (0.3, None),  # 64 SMs would do but for a step without an answer, 48 but for those of 64 tokens
        (0.5, 48),
        (0.9, 48),  # 32 but for those of 64 tokens
        (1.0, 32),  # exactly
        (9.0, 16),
    ],
)
def test_the_split_that_suits_can_be_pasted(tmp_path: Path, target_ms: float, split: int | None) -> None:
    """Decode late in at most 1% of its steps, then most prefill; other ways do not count."""
    layer = LAYERS["deepseek-v3"]
    wanted = ways(layer, SPLITS)
    p99_ms = {16: (5.0, 0.2), 32: (1.0, 0.2), 48: (0.4, 0.1), 64: (0.3, None), 80: (0.4, 0.1)}
    rows = []
    for way in wanted:
        for tokens, late in zip(layer.decode, p99_ms.get(way.split or 0, (0.01, 0.01)), strict=True):
            steps = [] if late is None else [0.01e-3] * 198 + [late * 1e-3] * 2
            rate = 99.0 if way.split is None or tokens == 1 else 90.0 - way.split
            rows.append(lanes.row_of("deepseek-v3", way, tokens, steps, rate, 100.0))
    random.shuffle(rows)
    splits = [way for way in wanted if way.split]
    line = lanes.suiting(rows, layer, splits, target_ms, 132)
    assert "\n" not in line
    config = tmp_path / "expertd.yaml"
    config.write_text(f"models: [{MODEL}]\n{line}\n")
    settings = load_settings(config)
    if split is None:
        assert line == "# no split with which at most 1% of decode steps take longer than 0.3 ms"
        assert not settings.partitions
        return
    assert line.endswith(
        f"  # at most 1% of decode over {target_ms:g} ms, prefill at {0.9 - split / 100:.2f}"
    )
    assert settings.partitions == {"decode": split, "prefill": 132 - split}
    decode, prefill = lanes_of(settings)
    assert (decode.partition, prefill.partition) == ("decode", "prefill")
    assert settings.lanes.decode_max_tokens == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layer", "ways"),
    [
        (["--ways", "turns,", "lanes"], "tiny", ["turns, chunks of 64", "lanes on all SMs"]),
        (["--ways", "lanes", "--http"], "tiny over HTTP", ["lanes on all SMs"]),
    ],
)
def test_it_runs_on_a_cpu(tmp_path: Path, options: list[str], layer: str, ways: list[str]) -> None:
    file = tmp_path / "lanes.json"
    few = ["--layers", "tiny", "--tokens", "1", "--lead", "0.1"]
    for seconds in ("0.5", "4"):  # the second on a machine that is too busy for any step in the first
        assert lanes.main([*few, "--seconds", seconds, "--json", str(file), *options]) == 0
        rows = json.loads(file.read_text())["rows"]
        if all(row["steps"] for row in rows if row["decode_tokens"]):
            break
    assert {row["layer"] for row in rows} == {layer}
    assert [row["way"] for row in rows] == ["alone", "alone", *ways]
    assert all(row["prefill_tokens_per_second"] for row in rows[1:])
    assert all(row["steps"] for row in rows if row["decode_tokens"])
