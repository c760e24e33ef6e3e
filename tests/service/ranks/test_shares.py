"""Which experts of which layers each rank holds, and the memory for them, by arithmetic."""

import re
from pathlib import Path
from typing import Any

import pytest

from expertd.backends import BACKENDS
from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.moe.needs import weights_bytes
from expertd.service.moe.placement import contiguous_placement
from expertd.service.moe.split import experts_of_rank
from expertd.service.ranks import shares as module
from expertd.service.ranks.shares import (
    ExchangeSizes,
    Share,
    budget_within,
    check_device_memory,
    exchange_bytes,
    experts_of,
    free_bytes,
    more_ranks,
    shares_of,
    smaller_budget,
)
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import LaneSettings
from expertd.service.settings.served import CheckpointSettings
from tests.service.checkpoints.builders import edit_json
from tests.service.checkpoints.encoders import bf16
from tests.service.checkpoints.layouts import write

HOPPER, REFERENCE = BACKENDS["hopper"], BACKENDS["reference"]

DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8, "num_shared_experts": 1,
}  # fmt: skip


def whole_model(**changes: Any) -> Settings:
    """DeepSeek-V3's 58 layers."""
    models = [{"name": f"deepseek-v3.layers.{layer}"} | DEEPSEEK_V3 for layer in range(3, 61)]
    return Settings.model_validate({"models": models, "backend": "hopper", "devices": "0-7"} | changes)


def weights_of(shares: list[Share]) -> int:
    return sum(share.needs.weights for share in shares)


def test_shared_experts_that_are_left_out_need_no_memory() -> None:
    settings = whole_model()
    without, with_none = (
        settings.model_copy(
            update={"models": tuple(model.model_copy(update=changes) for model in settings.models)}
        )
        for changes in ({"shared_experts": False}, {"num_shared_experts": 0})
    )
    for can in (REFERENCE, HOPPER):
        for share, expected in zip(shares_of(without, can), shares_of(with_none, can), strict=True):
            assert share.needs == expected.needs
            assert " of 256 without the 1 shared: " in share.text


def test_a_whole_model_fits_on_eight_gpus_and_not_on_four() -> None:
    settings = whole_model()
    shares = shares_of(settings, HOPPER)
    shape = settings.models[0].shape
    experts = 58 * (256 + 8) * shape.expert_bytes  # the shared one is on every rank
    router = 8 * 58 * 256 * 7168 * (4 + 4 + 2)
    assert weights_of(shares) == pytest.approx(experts + router, rel=1e-3)
    for rank, share in enumerate(shares):
        text = f"deepseek-v3.layers.3-60: experts {rank * 32}-{rank * 32 + 31} of 256 and 1 shared: "
        assert share.text.startswith(text)
        assert 84e9 < share.num_bytes < 100e9
    h200 = 140_000_000_000
    on_four = whole_model(devices="0-3")
    assert all(share.num_bytes > h200 for share in shares_of(on_four, HOPPER))
    assert more_ranks(on_four, HOPPER, available=h200) == "; 6 such GPUs would do"
    assert more_ranks(on_four, HOPPER, available=20_000_000_000) == ""
    assert more_ranks(on_four, BACKENDS["triton"], available=h200) == "", "whose GPUs share no layer"


def test_what_does_not_fit_gpus_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = whole_model(devices="2-5")

    def give(*free: int | None) -> None:
        of_device = dict(zip((2, 3, 4, 5), free, strict=True))
        monkeypatch.setattr(module, "free_gpu_bytes", lambda devices: [of_device[each] for each in devices])

    shares = shares_of(settings, HOPPER)
    enough = shares[0].num_bytes
    give(enough, enough, None, enough)  # one cannot be asked
    check_device_memory(settings, HOPPER)
    give(enough, enough, enough, 140_000_000_000)
    with pytest.raises(MemoryError) as caught:
        check_device_memory(settings, HOPPER)
    expected = f"memory, rank 3: expected room for {shares[3].text}, got 140.0 GB free; 6 such GPUs would do"
    said, _, budget = str(caught.value).rpartition("; ")
    assert said == expected
    assert re.fullmatch(
        r"weights_budget of \d+\.\d GB would do, with all experts in the host's memory", budget
    )
    assert "(weights 167.1 GB, steps " in expected
    assert ", graphs " in expected


def test_a_hint_says_which_budget_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"name": "a", "hidden_size": 2048, "intermediate_size": 768, "num_experts": 128, "top_k": 8}
    settings = Settings.model_validate({"models": [model], "backend": "triton"})
    needed = shares_of(settings, HOPPER)[0].num_bytes
    monkeypatch.setattr(module, "free_bytes", lambda settings, capabilities: [needed - 300_000_000])
    with pytest.raises(MemoryError) as caught:
        check_device_memory(settings, HOPPER)
    hint = r"; weights_budget of (\d+\.\d MB) would do, with all experts in the host's memory$"
    found = re.search(hint, str(caught.value))
    assert found is not None, caught.value
    values = settings.model_dump() | {"weights_budget": found[1]}
    check_device_memory(Settings.model_validate(values), HOPPER)
    values["weights_budget"] = "500MB"
    with pytest.raises(MemoryError, match=hint):
        check_device_memory(Settings.model_validate(values), HOPPER)
    assert smaller_budget(settings, HOPPER, needed - 600_000_000) == "", "without slots for the top_k"
    with_lanes = settings.model_copy(update={"lanes": LaneSettings(decode_max_tokens=8)})
    assert smaller_budget(with_lanes, HOPPER, needed - 300_000_000) == ""


def test_a_budget_fills_what_is_free() -> None:
    """Layers with a store have fewer graphs than others, for which 48 layers would need 3 GB."""
    model = {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128, "top_k": 8}
    models = [{**model, "name": f"{number}"} for number in range(48)]
    settings = Settings.model_validate({"models": models, "backend": "triton"})
    free = 11_000_000_000
    budget = budget_within(settings, HOPPER, free)
    assert budget is not None
    (share,) = shares_of(settings.model_copy(update={"weights_budget": budget}), HOPPER)
    assert 0 < share.needs.graphs < 1_100_000_000
    one_of_each = 48 * settings.models[0].shape.expert_bytes
    assert 0 <= free - share.num_bytes < one_of_each + 100_000_000
    assert budget_within(settings, BACKENDS["reference"], free) is None


def test_a_hint_says_how_many_tokens_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"name": "a", "hidden_size": 4096, "intermediate_size": 128, "num_experts": 1, "top_k": 1}
    limits = {"max_batch_tokens": 65536, "max_queue_tokens": 65536}
    settings = Settings.model_validate({"models": [model], "backend": "hopper", "limits": limits})
    needed = shares_of(settings, HOPPER)[0].num_bytes
    monkeypatch.setattr(module, "free_bytes", lambda settings, capabilities: [needed // 2])
    expected = r"^memory: expected room for .*; limits.max_batch_tokens of 16384 would do$"
    with pytest.raises(MemoryError, match=expected):
        check_device_memory(settings, HOPPER)
    monkeypatch.setattr(module, "free_bytes", lambda settings, capabilities: [1_000_000])
    with pytest.raises(MemoryError, match=r"got 1\.0 MB free$"):
        check_device_memory(settings, HOPPER)


def test_each_lane_has_memory_for_its_steps() -> None:
    model = {"name": "a", "hidden_size": 4096, "intermediate_size": 128, "num_experts": 1, "top_k": 1}
    lanes = {"decode_max_tokens": 64, "decode_batch_tokens": 128}
    one, two = (
        shares_of(Settings.model_validate({"models": [model], "backend": "hopper"} | more), HOPPER)[0]
        for more in ({}, {"lanes": lanes})
    )
    assert (one.needs.weights, one.needs.graphs) == (two.needs.weights, two.needs.graphs)
    assert 0 < two.needs.steps - one.needs.steps < one.needs.steps / 2


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 3},
        {"ranks": 2, "placement": {"policy": "balanced", "replicas": 2}},
        {"ranks": 4, "placement": {"policy": "balanced", "replicas": 4}},
    ],
)
def test_ranks_hold_what_the_arithmetic_says(changes: dict[str, Any]) -> None:
    model = {"name": "a", "hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}
    settings = Settings.model_validate({"models": [model], "backend": "reference"} | changes)
    ranks, physical = settings.num_ranks, list(range(8))
    if settings.placement.policy is not None:
        placement = contiguous_placement(8, ranks, 8 + settings.placement.replicas)
        physical = placement.physical_to_logical.tolist()
    held = [list(experts_of(settings, settings.models[0], rank)) for rank in range(ranks)]
    assert held == [list(experts_of_rank(physical, rank, ranks)) for rank in range(ranks)]
    assert set().union(*held) == set(range(8))


def test_one_device_holds_all_of_every_layer() -> None:
    models = [
        {"name": name, "hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}
        | ({"local_experts": "2-5"} if name == "part" else {})
        for name in ("whole", "m.layers.4", "m.layers.5", "part")
    ]
    settings = Settings.model_validate({"models": models, "backend": "reference"})
    (share,) = shares_of(settings, REFERENCE)
    assert share.held == {
        "experts 0-7 of 8": ("whole", "m.layers.4", "m.layers.5"),
        "experts 2-5 of 8": ("part",),
    }
    assert "m.layers.4-5, whole: experts 0-7 of 8; part: experts 2-5 of 8: " in share.text
    assert share.needs.weights > sum(weights_bytes(model.shape) for model in settings.models)
    (free,) = free_bytes(settings, REFERENCE)
    assert free is not None
    assert share.num_bytes < free


def test_what_gpus_share_has_room_for_graphs_and_for_a_row_of_each_slot(tmp_path: Path) -> None:
    settings = whole_model(limits={"max_batch_tokens": 4096, "max_request_tokens": 4096})
    assert ExchangeSizes.of(settings, settings.models[0]) == (512, 4096, 7168, 8)
    row = 7168 + 7168 // 128 * 4 + 2 * 8 * 8  # values, scales, and pairs of two calls
    counts = 1024 * 64 * 4  # of pairs, of each group from each segment
    assert 0 < exchange_bytes(settings) - 4096 * (row + 2 * 7168) - counts < 8 * 1024
    few = whole_model(limits={"max_batch_tokens": 64, "max_request_tokens": 64})
    assert ExchangeSizes.of(few, few.models[0]) == (256, 2048, 7168, 8), "as graphs pad steps"
    write(tmp_path / "model", bf16, "transposed", quantization=None)
    edit_json(tmp_path / "model" / "config.json", num_experts_per_tok=3)
    served = (CheckpointSettings(path=tmp_path / "model", layers="all"),)
    on_two = resolve_checkpoints(Settings(backend="hopper", devices="0-1", checkpoints=served))
    assert ExchangeSizes.of(on_two, on_two.models[0]) == (2048 * 3, 4096 * 3, 256, 1)


def test_layers_that_are_not_loaded_at_first_need_nothing() -> None:
    model = {"name": "a", "hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}
    later = {**model, "name": "b", "load": False}
    both, one, none = (
        shares_of(Settings.model_validate({"models": models, "backend": "reference"}), REFERENCE)[0]
        for models in ([model, later], [model], [later])
    )
    assert (both.needs, both.held) == (one.needs, one.held)
    assert none.text.startswith("no layer at first: 0.0 MB")
