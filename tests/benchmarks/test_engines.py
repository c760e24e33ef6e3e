"""Engines alone and with remote experts: shapes, and the rows of several turns."""

import pytest

from benchmarks.engines.engines import SHAPES, rows_of


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

    found = {
        ("alone", 32, 4): [turn(2.0, 8.0), turn(4.0, 10.0), turn(2.5, 9.0)],
        ("device", 32, 4): [turn(5.0, 27.0), turn(4.0, 9.0), turn(9.0, 18.0)],
    }
    alone, device = rows_of("tiny", 2, found)
    assert (alone["decode_ratio"], alone["ttft_ratio"]) == (1, 1)
    assert (device["decode_ms"], device["decode_ratio"]) == (5.0, 2.0)
    assert (device["ttft_ms"], device["ttft_ratio"]) == (18.0, 2.0)
    assert (alone["per_gpu"], device["per_gpu"]) == (4 / 2.5e-3, 4 / 5e-3 / 2)
