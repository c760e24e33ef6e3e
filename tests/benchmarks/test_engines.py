"""Engines alone and with remote experts: shapes, cases, and the rows of several turns."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engines.engines import SHAPES, case_of, points_of, rows_of
from benchmarks.lib.markdown import NOT_MEASURED
from benchmarks.pictures import digest, draw_engines
from benchmarks.report import SECTIONS


@pytest.mark.parametrize("name", SHAPES)
def test_the_server_has_the_layers_of_the_checkpoint(name: str) -> None:
    shape = SHAPES[name]
    config, served = shape.config_of(5), shape.served(5)
    first = config.get("first_k_dense_replace", 0)
    assert [each["name"] for each in served] == [f"bench.layers.{first + number}" for number in range(5)]
    assert config["num_hidden_layers"] == first + 5
    for each in served:
        assert each["hidden_size"] == config["hidden_size"]
        assert each["intermediate_size"] == config["moe_intermediate_size"]
        assert each["num_experts"] == config.get("num_experts", config.get("n_routed_experts"))
        assert each["top_k"] == config["num_experts_per_tok"]


def test_rows_are_medians_of_turns() -> None:
    def turn(decode: float, ttft: float) -> dict[str, object]:
        return {"decode_ms": decode, "ttft_ms": ttft, "busy": [0.5]}

    turns = {
        "alone": [turn(2.0, 8.0), turn(4.0, 10.0), turn(2.5, 9.0)],
        "device": [turn(5.0, 27.0), turn(4.0, 9.0), turn(9.0, 18.0)],
        "pieces": [turn(5.0, 9.0)],
    }
    point = {"shape": "tiny", "layers": 2, "prompt": 32, "batch": 4}
    alone, device, pieces = rows_of(point, turns)
    assert (alone["decode_ratio"], alone["ttft_ratio"]) == (1, 1)
    assert (device["decode_ms"], device["decode_ratio"]) == (5.0, 2.0)
    assert (device["ttft_ms"], device["ttft_ratio"]) == (18.0, 2.0)
    assert (alone["per_gpu"], device["per_gpu"]) == (4 / 2.5e-3, 4 / 5e-3 / 2)
    assert pieces["per_gpu"] == 4 / 5e-3


def test_a_case_has_a_shape_and_layers() -> None:
    assert case_of("deepseek-v3:4") == ("deepseek-v3", 4)
    for text in ("deepseek-v3", "deepseek-v3:0", "deepseek-v3:x", "other:4"):
        with pytest.raises(SystemExit, match=f"a colon and a number of layers, got '{text}'"):
            case_of(text)


def test_points_whose_cache_has_no_room_are_left_out() -> None:
    """A token of Qwen3-30B's has 2 KB in each layer; 256 of 2048 and some have 0.57 million."""
    options = argparse.Namespace(prompts="2048,32", batches="256,1", tokens=64, cache_gb=40.0)
    every = [(2048, 256), (2048, 1), (32, 256), (32, 1)]
    assert points_of(SHAPES["qwen3-30b"], 8, options) == every
    assert points_of(SHAPES["qwen3-30b"], 48, options) == every[1:]


def rows(shape: str, layers: int) -> Iterator[dict[str, object]]:
    """For prompts of 32 and 2048; batches of 1 and 64, for which remote experts take 1.05 and 1.5 times."""
    for prompt in (32, 2048):
        for batch, ratio in ((1, 1.05), (64, 1.5)):
            turns = {
                "alone": [{"decode_ms": 2.0, "ttft_ms": 30.0, "busy": [0.75, 0.0]}],
                "pieces": [{"decode_ms": 4.0, "ttft_ms": 30.0, "busy": [0.75, 0.0]}],
                "device": [{"decode_ms": 2.0 * ratio, "ttft_ms": 33.0, "busy": [0.75, 0.5]}],
            }
            yield from rows_of({"shape": shape, "layers": layers, "prompt": prompt, "batch": batch}, turns)


def test_the_readme_begins_with_engines_once_they_are_measured(tmp_path: Path) -> None:
    assert SECTIONS["headline"](tmp_path) == NOT_MEASURED
    about = {
        "versions": {"vllm": "0.33.0", "torch": "2.11"}, "gpu": "NVIDIA H200", "gpus": 2, "tokens": 64,
        "turns": 2,
    }  # fmt: skip
    content = {"about": about, "rows": [*rows("qwen3-30b", 8), *rows("deepseek-v3", 4)]}
    file = tmp_path / "engines-2xh200.json"
    file.write_text(json.dumps(content))
    text = SECTIONS["headline"](tmp_path).replace("\n", " ")
    assert text.startswith(
        "A decode step of an unmodified vLLM 0.33.0 on one NVIDIA H200, with its experts on"
    )
    assert "1.05 and 1.50 times as long for 1 and 64 sequences with 8 MoE layers of Qwen3-30B-A3B's" in text
    assert "1.05 and 1.50 times as long for 1 and 64 sequences with 4 MoE layers of DeepSeek-V3's" in text
    assert text.endswith("Prompts have 32 tokens, and weights are random.")
    *_, pieces, last = SECTIONS["engines"](tmp_path).splitlines()
    assert pieces.startswith("| DeepSeek-V3 | 4 | pieces | 2048 | 64 | 4.00 (2.00) | 2.00 |")
    cells = "DeepSeek-V3 | 4 | device | 2048 | 64 | 3.00 (2.00) | 1.50 | 33.0 (30.0) | 1.10"
    assert last == f"| {cells} | 10667 (32000) | 25% and 50% |"
    (tmp_path / "engines-pieces-2xh200.json").write_text(
        json.dumps({"about": about | {"turns": 1}, "rows": [*rows("qwen3-30b", 8)]})
    )
    text = SECTIONS["engines"](tmp_path)
    assert "Medians of 2 turns, but 1 of *channel* and *pieces*" in text.replace("\n", " ")
    assert text.splitlines()[-2:] == [
        line.replace("DeepSeek-V3 | 4", "Qwen3-30B-A3B | 8")
        for line in (pieces, f"| {cells} | 10667 (32000) | 25% and 50% |")
    ]
    draw_engines(file, tmp_path / "engines.svg")
    assert digest(file) in (tmp_path / "engines.svg").read_text()
