"""The table of docs/consumer-card.md, and the configuration that it describes."""

import pytest

from expertd.limits import MAX_GROUPS
from expertd.service.commands.host_memory import host_memory
from expertd.service.engine.memory_needs import expert_slots
from expertd.service.ranks.shares import shares_of
from expertd.service.settings.loader import load_settings
from tests.paths import ROOT
from tests.service.checkpoints import cards
from tests.service.checkpoints.cards import (
    CARDS,
    CONFIG,
    GIB,
    MODELS,
    QWEN3,
    RESERVED,
    TRITON,
    fit,
    settings_of,
)

PAGE = ROOT / "docs" / "consumer-card.md"


@pytest.mark.thorough
def test_the_documented_table_is_the_current_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cards.main([str(PAGE), "--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS)
def test_a_larger_card_takes_more(name: str) -> None:
    """Of layers, and then of slots; without a store, copies limit nothing, and the host has no experts."""
    taken = [
        (each.num_layers, MAX_GROUPS if each.slots is None else each.slots)
        for each in (fit(name, card) for card in CARDS)
    ]
    assert taken == sorted(taken)
    assert len(set(taken)) > 1
    for each in (fit(name, card) for card in CARDS):
        assert (each.slots is None) == (each.host_bytes == 0) == (each.fastest == 0)
        assert each.slowest <= each.fastest


def test_experts_with_biases_have_slots_and_their_biases_are_on_the_host() -> None:
    (name,) = (name for name in MODELS if "gpt-oss" in name)
    experts = 24 * 32 * settings_of(name).models[0].shape.bias_bytes
    has_slots, pinned = fit(name, 12).slots is not None, fit(name, 12).host_bytes
    assert has_slots
    assert pinned > 24 * 32 * settings_of(name).models[0].shape.expert_bytes + experts
    assert fit(name, 16).num_layers == 24


def test_the_configuration_of_12_gb_has_as_many_slots_as_fit() -> None:
    given = settings_of(QWEN3).model_copy(update={"weights_budget": load_settings(CONFIG).weights_budget})
    (share,) = shares_of(given, TRITON)
    assert 0 <= 12 * GIB - RESERVED - share.num_bytes < len(given.models) * given.models[0].shape.expert_bytes
    assert set(expert_slots(given, TRITON).values()) == {fit(QWEN3, 12).slots}
    pinned = host_memory(given, TRITON).pinned
    assert sum(pinned.values()) - max(pinned.values()) < GIB // 2, "little beside the experts"


@pytest.mark.parametrize("why", [
    "a GPU of compute capability 7.5 instead of 8.x, 9.0 or 12.x", "no triton installed",
    "no cuda.core installed", "a driver for CUDA 12.4 instead of 13.0 or newer",
    "a PyTorch that is built without CUDA", "no CUDA device",
])  # fmt: skip
def test_the_reasons_are_documented(why: str) -> None:
    """Those of tests/kernels/test_checks.py."""
    assert f"`{why}`" in PAGE.read_text()
