"""What fits on consumer cards, by arithmetic, from the sizes of published models and configs/rtx4070.yaml.

`python -m tests.service.checkpoints.cards docs/consumer-card.md` writes the table between its markers;
`--check` only compares.
"""

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, cast

from expertd.activation import COMMON
from expertd.backends import BACKENDS
from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints import CheckpointModelSettings, LayerSource, MoEModel
from expertd.service.checkpoints.encodings import Encoding
from expertd.service.checkpoints.model import Biases
from expertd.service.commands.host_memory import host_memory
from expertd.service.engine.memory_needs import expert_slots
from expertd.service.moe.expert_budget import COPY_RATES, ROUTINGS, copies_of_token
from expertd.service.ranks.shares import budget_within, shares_of
from expertd.service.settings.loader import load_settings
from expertd.service.settings.model import Settings
from expertd.service.util import tables
from expertd.weight_format import FP8_BLOCKS, WeightFormat, WeightLayout
from tests.paths import ROOT
from tests.service.checkpoints.published import described, stated_of, understood

CONFIG = ROOT / "configs" / "rtx4070.yaml"
GIB = 1024**3
CARDS = (8, 12, 16, 24)  # GiB
RESERVED = 3 * GIB // 2  # of a card, for CUDA's context and a display: assumed
LINK = "PCIe 4 x16"
TRITON = BACKENDS["triton"]

# Of the models that published.json lacks, from their config.json.
_MORE: dict[str, dict[str, Any]] = {
    "allenai/OLMoE-1B-7B-0924": {
        "model_type": "olmoe", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
        "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    },
}  # fmt: skip
QWEN3 = "Qwen/Qwen3-30B-A3B-FP8"
MODELS = (*_MORE, "openai/gpt-oss-20b", QWEN3, "Qwen/Qwen3.5-35B-A3B", "mistralai/Mixtral-8x7B-v0.1")


class Fit(NamedTuple):
    """What a card takes of a model.

    num_layers  all of them, but if a budget is impossible
    slots       of a layer for routed experts; None: all are on the card
    slowest     tokens per second that copies over `LINK` allow, one at a time: with uniform routing
    fastest     with Zipf's
    host_bytes  pinned
    """

    num_layers: int
    slots: int | None = None
    slowest: float = 0.0
    fastest: float = 0.0
    host_bytes: int = 0


def settings_of(name: str) -> Settings:
    """Those of `CONFIG`, with all layers of a published model, and without its budget."""
    model = described({"config.json": _MORE[name]}) if name in _MORE else understood(name)
    given = load_settings(CONFIG).model_copy(update={"weights_budget": None})
    return given.with_models([_layer(model, layer) for layer in model.layers])


def _layer(model: MoEModel, layer: int) -> CheckpointModelSettings:
    """As a server has it, but for the tensors, of which nothing is read here."""
    tensor = cast(Any, None)
    is_mxfp4 = stated_of(model) == {Encoding.MXFP4}
    layout = WeightLayout(WeightFormat.MXFP4, 32, "U8") if is_mxfp4 else FP8_BLOCKS
    biases = None if model.names.biases is None else Biases(tensor, tensor, (), interleaved=False)
    return CheckpointModelSettings(
        name=f"layers.{layer}",
        hidden_size=model.hidden_size,
        intermediate_size=-(-model.intermediate_size // SCALE_BLOCK) * SCALE_BLOCK,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_shared_experts=model.num_shared_experts,
        source=LayerSource("", tensor, None, (), None, biases, layout, layout),
        rule=model.rules.get(layer, COMMON),
    )


@cache
def fit(name: str, card: int) -> Fit:
    """How a card of `card` GiB serves a model."""
    whole, free = settings_of(name), card * GIB - RESERVED
    count = len(whole.models)
    if _fits(whole, free):
        return Fit(count)
    if (budget := budget_within(whole, TRITON, free)) is None:
        return Fit(max(number for number in range(count) if _fits(_first(whole, number), free)))
    given = whole.model_copy(update={"weights_budget": budget})
    assert _fits(given, free)
    slots = expert_slots(given, TRITON)
    shapes = {model.name: model.shape for model in given.models}
    copies = [copies_of_token(shapes, slots, exponent) for exponent in ROUTINGS.values()]
    slowest, fastest = (COPY_RATES[LINK] / each.num_bytes for each in copies)
    pinned = sum(host_memory(given, TRITON).pinned.values())
    return Fit(count, min(slots.values()), slowest, fastest, pinned)


def _fits(settings: Settings, free: int) -> bool:
    return shares_of(settings, TRITON)[0].num_bytes <= free


def _first(settings: Settings, number: int) -> Settings:
    return settings.model_copy(update={"models": settings.models[:number]})


def table() -> str:
    """A Markdown table with a row for each model, and a column for each card."""
    head = ["experts, layers", "experts, GB", *(f"{card} GB" for card in CARDS), "host, GB"]
    rows = [list(_row(name)) for name in MODELS]
    lines = [f"| {' | '.join(row)} |\n" for row in (["model", *head], *rows)]
    return "".join([lines[0], "|---" * (len(head) + 1), "|\n", *lines[1:]])


def _row(name: str) -> Iterator[str]:
    models = settings_of(name).models
    shape = models[0].shape
    shared = f"+{shape.num_shared_experts}" if shape.num_shared_experts else ""
    yield name.rpartition("/")[2]
    yield f"{shape.num_experts}{shared}, {len(models)}"
    yield f"{sum(model.shape.num_groups * model.shape.expert_bytes for model in models) / 1e9:.1f}"
    fits = [fit(name, card) for card in CARDS]
    for each in fits:
        if each.slots is not None:
            yield f"{each.slots}: {each.slowest:.0f} to {each.fastest:.0f}"
        else:
            yield "all" if each.num_layers == len(models) else f"{each.num_layers} layers"
    most = max(each.host_bytes for each in fits)
    yield f"{most / 1e9:.1f}" if most else ""


def main(arguments: list[str] | None = None) -> int:
    """Write the table into a document, or compare; returns the exit code."""
    return tables.run({"cards": table}, "tests.service.checkpoints.cards", arguments)


if __name__ == "__main__":
    sys.exit(main())
