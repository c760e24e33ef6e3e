"""Whole checkpoints of four bits in their publishers' files: served, compared with float64."""

from pathlib import Path

import pytest

from expertd.backends import BACKENDS
from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.ranks.shares import shares_of
from expertd.weight_format import WeightFormat
from expertd_client.weights import weights_id
from tests.kernels.helpers import diff, fresh_generator
from tests.service.apps import tiny_settings
from tests.service.checkpoints.builders import edit_json
from tests.service.checkpoints.encoders import bf16
from tests.service.checkpoints.vendors import (
    EXPERTS,
    HIDDEN,
    LAYER,
    TOKENS,
    VENDORS,
    expected_rows,
    new_tokens,
    served,
    write,
)  # fmt: skip


@pytest.mark.parametrize("name", VENDORS)
async def test_a_checkpoint_is_served_as_it_is(name: str, tmp_path: Path) -> None:
    vendor, generator = VENDORS[name], fresh_generator()
    layer, tokens = write(tmp_path, name, generator), new_tokens(generator)
    given, about, answer = await served(tmp_path, tokens)
    assert about["weight_format"] == vendor.format
    assert about["weights_id"] == weights_id(tmp_path, LAYER)
    expected, is_clear = expected_rows(name, layer, tokens)
    assert is_clear.sum() >= TOKENS - 1
    most = 2e-3 if vendor.shared == ("shared_experts", bf16) else 2e-4  # which is rounded to FP8
    assert diff(answer[is_clear], expected[is_clear]) < most

    (share,) = shares_of(given, BACKENDS["triton"])
    assert f"experts 0-{EXPERTS - 1} of {EXPERTS}" in share.text
    assert f" in {vendor.format}" in share.text
    (shape,) = (model.shape for model in given.models)
    whole = 4 * EXPERTS * (2 * shape.intermediate_size + HIDDEN) if vendor.format is WeightFormat.NVFP4 else 0
    assert EXPERTS * shape.expert_bytes == layer.num_bytes + whole


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("AWQ without zero points", {"zero_point": True}, "zero_point: expected false, got true for "),
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", {"sym": False}, "sym: expected true, got false for "),
    ],
)
def test_asymmetric_integers_are_refused_in_a_sentence(
    name: str, said: dict[str, object], expected: str, tmp_path: Path
) -> None:
    """As most AWQ checkpoints are."""
    write(tmp_path, name, fresh_generator())
    quantization = VENDORS[name].config["quantization_config"] | said
    edit_json(tmp_path / "config.json", quantization_config=quantization)
    given = tiny_settings(models=[], checkpoints=[{"path": tmp_path, "layers": str(LAYER)}])
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config\.{expected}"):
        resolve_checkpoints(given)
