"""How a budget of a device's memory is divided among layers whose experts are in the host's memory.

Does not import torch. See docs/expert-store.md.
"""

from collections.abc import Iterable, Mapping
from math import exp
from typing import NamedTuple

from expertd.limits import MAX_GROUPS
from expertd.service.moe.shape import LayerShape
from expertd.weight_format import WeightLayout

COPY_RATES = {"PCIe 4 x16": 25e9, "PCIe 5 x16": 55e9}
"""Bytes per second from pinned memory of the host, about what such links reach."""
ROUTINGS = {"uniform": 0.0, "Zipf": 1.0}
"""Exponents for `copies_of_token`."""
_CHUNK_BYTES = 16 * 1024 * 1024
_LONGEST, _HALVINGS = 2.0**64, 60  # of a search for a number of uses


def chunk_experts(shape: LayerShape) -> int:
    """The experts that a step copies at a time if not all that it needs fit into the slots.

    Few enough for two chunks to take little of the budget, and for the products with the last one, which no
    copy hides, to take little time.
    """
    return max(1, min(_CHUNK_BYTES // shape.expert_bytes, len(shape.held_experts) // 16))


def chunk_sizes(shape: LayerShape) -> tuple[int, int, int, WeightLayout]:
    """Equal for layers that share chunks, since their steps take turns."""
    return shape.hidden_size, shape.intermediate_size, chunk_experts(shape), shape.weight_layout


def chunks_bytes(shapes: Iterable[LayerShape]) -> int:
    """Bytes for the chunks of these layers: two of each size, one to be copied, one to be multiplied."""
    each = {chunk_sizes(shape): shape for shape in shapes}
    return sum(2 * chunk_experts(shape) * shape.expert_bytes for shape in each.values())


def slots_within(
    budget: int, shapes: Mapping[str, LayerShape], setting: str = "weights_budget"
) -> dict[str, int]:
    """The slots of each layer for routed experts, with all experts in `budget` bytes; {}: all of them fit.

    Every layer gets slots for the same part of its routed experts, and room for its shared ones. Raises
    ValueError (name, expected, got), of this setting, if a layer would have fewer than its top_k, or has too
    many experts.
    """
    routed = {name: len(shape.held_experts) * shape.expert_bytes for name, shape in shapes.items()}
    fixed = sum(shape.num_shared_experts * shape.shared_expert_bytes for shape in shapes.values())
    if fixed + sum(routed.values()) <= budget:
        return {}
    fixed += chunks_bytes(shapes.values())
    part = max(0, budget - fixed) / sum(routed.values())
    slots = {name: int(part * len(shape.held_experts)) for name, shape in shapes.items()}
    min_slots = {name: min(shape.top_k, len(shape.held_experts)) for name, shape in shapes.items()}
    if any(slots[name] < min_slots[name] for name in shapes):
        needed = max(min_slots[name] / len(shape.held_experts) for name, shape in shapes.items())
        num_bytes = fixed + needed * sum(routed.values())
        expected = f"at least {num_bytes / 1e6 + 0.1:.1f} MB, with which each layer has slots for its top_k"
        raise ValueError(f"{setting}: expected {expected}, got {budget / 1e6:.1f} MB")
    max_slots = {name: _max_slots(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if max_slots[name] < min_slots[name]:
            expected = f"layers of at most {MAX_GROUPS // 2} experts"
            raise ValueError(f"{setting}: expected {expected}, got {shape.num_experts} of model {name}")
    return {name: min(slots[name], max_slots[name]) for name in shapes}


def _max_slots(shape: LayerShape) -> int:
    """With more, a step might have too many groups: the slots twice, and what does not fit by chunks."""
    chunk = chunk_experts(shape)
    return MAX_GROUPS - len(shape.held_experts) - 2 * shape.num_shared_experts - chunk


def lru_hit_rate(num_experts: int, num_slots: int, exponent: float) -> float:
    """The part of a token's experts that are in slots, if the least recently used leave and Zipf's law holds.

    exponent  of the law by which experts are chosen, each time anew; 0: all equally often. Che's
              approximation: an expert stays for the time in which as many others are used as there are slots
    """
    ranks = range(1, num_experts + 1)
    parts = [1 / rank**exponent for rank in ranks]
    shares = [part / sum(parts) for part in parts]
    low, high = 0.0, 1.0
    while sum(1 - exp(-share * high) for share in shares) < num_slots and high < _LONGEST:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(1 - exp(-share * middle) for share in shares) < num_slots:
            low = middle
        else:
            high = middle
    return float(sum(share * (1 - exp(-share * high)) for share in shares))


class ExpectedCopies(NamedTuple):
    """What a token waits for in a step of its own.

    hits       the part of its experts that are in slots
    num_bytes  of its other experts, in all layers with slots
    """

    hits: float
    num_bytes: float


def copies_of_token(
    shapes: Mapping[str, LayerShape], slots: Mapping[str, int], exponent: float
) -> ExpectedCopies:
    """What to expect of layers with these slots, by `lru_hit_rate`; `slots` has at least one layer."""
    layers = [(shapes[name], number) for name, number in slots.items()]
    rates = [lru_hit_rate(len(shape.held_experts), number, exponent) for shape, number in layers]
    missed = sum(
        (1 - rate) * shape.top_k * shape.expert_bytes for rate, (shape, _) in zip(rates, layers, strict=True)
    )
    return ExpectedCopies(sum(rates) / len(rates), missed)
