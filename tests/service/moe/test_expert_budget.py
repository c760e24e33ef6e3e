"""How a budget is divided among layers, and what hits it gives, by arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from expertd.limits import MAX_GROUPS
from expertd.service.moe.expert_budget import chunk_experts, chunks_bytes, lru_hit_rate, slots_within
from expertd.service.moe.needs import part_of_layer, weights_bytes
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.slot_table import SlotTable
from tests.kernels.helpers import fresh_generator

QWEN = LayerShape(2048, 768, 128, 8)
DEEPSEEK = LayerShape(7168, 2048, 256, 8, num_shared_experts=1)
GIB = 1 << 30


def kept(budget: int, shapes: dict[str, LayerShape]) -> dict[str, int]:
    """The slots, after a look at whether the budget is kept, and used."""
    slots = slots_within(budget, shapes)
    router = {name: 4 * shape.num_experts * shape.hidden_size for name, shape in shapes.items()}
    used = sum(
        weights_bytes(part_of_layer(shape, slots[name])) - router[name] for name, shape in shapes.items()
    )
    used += chunks_bytes(shapes.values())
    largest = sum(shape.expert_bytes for shape in shapes.values())
    assert budget - largest < used <= budget
    return slots


def test_layers_get_slots_for_the_same_part_of_their_experts() -> None:
    assert kept(10 * GIB, {f"{number}": QWEN for number in range(48)}) == {str(n): 47 for n in range(48)}
    assert slots_within(30 * GIB, {f"{number}": QWEN for number in range(48)}) == {}
    wide = replace(QWEN, intermediate_size=1536, num_experts=64)
    slots = kept(GIB // 2, {"a": QWEN, "b": wide})
    assert slots["a"] // 2 == slots["b"]
    assert (
        kept(6 * GIB, {"a": DEEPSEEK})["a"]
        < kept(7 * GIB, {"a": replace(DEEPSEEK, num_shared_experts=0)})["a"]
    )


def test_a_budget_that_is_too_small_is_refused_with_one_that_would_do() -> None:
    shapes = {"a": QWEN, "b": replace(QWEN, top_k=10)}
    with pytest.raises(ValueError, match=r"weights_budget: expected at least .* got 100\.0 MB") as caught:
        slots_within(100_000_000, shapes)
    least = float(str(caught.value).split("at least ")[1].split(" MB")[0])
    assert min(kept(int(least * 1e6), shapes).values()) == 10


def test_a_step_never_has_too_many_groups() -> None:
    shape = LayerShape(1024, 512, 512, 10, num_shared_experts=1)
    slots = slots_within(511 * shape.expert_bytes, {"a": shape})["a"]
    chunk = chunk_experts(shape)
    streamed = 512 - slots
    groups = 2 * (slots + 1) + -(-streamed // chunk) * chunk
    assert slots > 400
    assert groups <= MAX_GROUPS
    many = LayerShape(1024, 512, 1024, 10)
    with pytest.raises(
        ValueError, match="weights_budget: expected layers of at most 512 experts, got 1024 of"
    ):
        slots_within(600 * many.expert_bytes, {"a": many})


def test_chunks_are_small() -> None:
    assert [chunk_experts(shape) for shape in (QWEN, DEEPSEEK, LayerShape(128, 128, 4, 2))] == [3, 1, 1]
    assert chunks_bytes([QWEN, replace(QWEN, top_k=4), DEEPSEEK]) == 2 * (
        3 * QWEN.expert_bytes + DEEPSEEK.expert_bytes
    )


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0])
def test_hits_are_as_expected(exponent: float) -> None:
    generator = np.random.default_rng(fresh_generator().initial_seed())
    num_experts, num_slots, steps = 64, 20, 6000
    shares = np.arange(1, num_experts + 1) ** -exponent
    table, hits = SlotTable(num_experts, num_slots), 0
    for expert in generator.choice(num_experts, steps, p=shares / shares.sum()):
        hits += len(table.take(np.bincount([expert], minlength=num_experts)).present)
    assert lru_hit_rate(num_experts, num_slots, exponent) == pytest.approx(hits / steps, abs=0.03)
