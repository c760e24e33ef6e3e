"""When experts on GPUs of their own pay: arithmetic for decode, for docs/when-it-pays.md.

Measured: a layer's time on the GPU that has 32 of its experts, what a device call adds, a copy's rate in a
GPU's memory, and the rate of a link. Computed: what attention takes, at that copy's rate, which no kernel
exceeds; so attention is somewhat slower, and feeds fewer tokens to experts, than said here.

apart   `attention` GPUs with all of attention and the KV cache, and the model's expert GPUs. In one batch, a
        layer takes as long as attention and experts together; in two that take turns, twice as long as the
        longer one of them for half of the tokens. Whichever is faster counts
inside  the same GPUs and sequences, as far as there is room, in groups: each GPU has attention, its part of
        the cache, and an equal part of its group's experts. The exchange of tokens is left out
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib.markdown import Columns, Row, Section, lines, read

GPU_BYTES = 0.9 * 141e9
LINK = 345e9
"""Bytes/s each way, of each of four H200s that write to all others: docs/internals/benchmarks-parallel.md."""
CONTEXT = 8192
LIMITS: tuple[int | None, ...] = (16, 64, None)
MOST_RATIO = 16  # attention GPUs for each expert GPU
EXPERTS = 32  # of a layer on each GPU, in the measured rows
TOP_K = 8
_BF16 = 2


class Model(NamedTuple):
    """A model's MoE layers; dense ones are left out.

    gpus        that have all experts, 32 of each layer each
    measured    the layer's name in the results
    attention   weights of a layer's attention and shared expert, a byte each
    cached      bytes of a token in a layer's KV cache
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    gpus: int
    measured: str
    attention: int
    cached: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of weights in all layers, on each GPU that has experts."""
        return self.layers * EXPERTS * 3 * self.hidden * self.intermediate

    def room(self, taken: int) -> int:
        """The sequences that a GPU's memory has room for, beside attention's weights and `taken` bytes."""
        left = GPU_BYTES - self.layers * self.attention - taken
        return int(left / (self.layers * self.cached * CONTEXT))


def _latent(hidden: int, heads: int, shared: int) -> int:
    """Weights of multi-head latent attention as in DeepSeek-V3, and of a shared expert."""
    query, latent = 1536 * (hidden + heads * 192), 576 * hidden + 512 * heads * 256
    return query + latent + heads * 128 * hidden + 3 * hidden * shared


_LATENT_BYTES = 576 * _BF16
MODELS = (
    Model("DeepSeek-V3", 58, 7168, 2048, 8, "deepseek-v3/ep8", _latent(7168, 128, 2048), _LATENT_BYTES),
    Model("Kimi-K2", 60, 7168, 2048, 12, "deepseek-v3/ep8", _latent(7168, 64, 2048), _LATENT_BYTES),
    Model(
        "Qwen3-235B-A22B", 94, 4096, 1536, 4, "qwen3-235b/ep4",
        4096 * 128 * (2 * 64 + 2 * 4), 2 * 4 * 128 * _BF16,
    ),
)  # fmt: skip


class Measured(NamedTuple):
    """What the results say, in seconds and bytes/s; layers by tokens, each with 8 of a GPU's experts."""

    layers: Mapping[str, Mapping[int, float]]
    call: float
    memory: float


class Way(NamedTuple):
    """What a way comes to: sequences on all GPUs, and the seconds of a step."""

    sequences: float
    step: float


def measured(results: Path) -> Measured:
    """From the folder of results. Raises FileNotFoundError."""
    layer, calls = read(results, "moe_layer_newest-h200.json"), read(results, "stream_steps-2xh200.json")
    layers: dict[str, dict[int, float]] = {}
    for row in layer["rows"]:
        layers.setdefault(row["layer"], {})[row["tokens"]] = row["us"] / 1e6
    call = max(row["over_us"] for row in calls["rows"] if row["between_us"] > 0) / 1e6
    return Measured(layers, call, layer["about"]["copy_tbps"] * 1e12)


def attention_seconds(model: Model, sequences: float, known: Measured) -> float:
    """Seconds of a layer's attention for one token of each sequence."""
    return (model.attention + sequences * CONTEXT * model.cached) / known.memory


def expert_seconds(model: Model, tokens: float, known: Measured, part: float = 1.0) -> float:
    """Of a layer on each of the model's GPUs, for `tokens` of all callers. Raises ValueError past the last
    measured point.
    """
    own = tokens / model.gpus
    points = sorted(known.layers[model.measured].items())
    if own <= points[0][0]:
        return points[0][1]
    for (fewer, low), (more, high) in pairwise(points):
        if own <= more:
            return low + (high - low) * (own - fewer) / (more - fewer)
    raise ValueError(f"tokens: expected at most {points[-1][0]} on each GPU, got {own:.0f}")


def wire_seconds(model: Model, tokens: float) -> float:
    """Of tokens' hidden states to each GPU with one of their experts, and of outputs back."""
    share = 1 - (1 - 1 / model.gpus) ** TOP_K
    return 2 * tokens * share * model.hidden * _BF16 / LINK


def apart(model: Model, attention: int, sequences: int, known: Measured) -> Way:
    """`attention` GPUs with `sequences` each, beside the model's expert GPUs."""

    def seconds(each: float) -> tuple[float, float]:
        tokens = attention * each
        experts = expert_seconds(model, tokens, known) + known.call + wire_seconds(model, tokens)
        return attention_seconds(model, each, known), experts

    layer = min(sum(seconds(sequences)), 2 * max(seconds(sequences / 2)))
    return Way(attention * sequences, model.layers * layer)


def part_seconds(model: Model, tokens: float, known: Measured, part: float) -> float:
    """The same on GPUs that have a part of 32 experts each.

    Where weights take longest, that part of their time; where products do, as long as they would take with
    all: the line through the last two measured points.
    """
    points = sorted(known.layers[model.measured].items())
    (_, weights), (fewer, low), (more, high) = points[1], *points[-2:]
    products = high + (high - low) * (tokens * part / model.gpus - more) / (more - fewer)
    return max(part * weights, products, points[0][1])


def inside(model: Model, group: int, sequences: float, known: Measured) -> Way:
    """A group of GPUs with `sequences` each, or as many as they have room for."""
    part = model.gpus / group
    each = min(sequences, model.room(int(model.expert_bytes * part)))
    seconds = part_seconds if group > model.gpus else expert_seconds
    layer = attention_seconds(model, each, known) + seconds(model, each * group, known, part)
    return Way(each * group, model.layers * layer)


def rows(known: Measured) -> Iterator[Row]:
    """For each model and number of sequences: the attention GPUs with the most tokens/s for each GPU."""
    for model in MODELS:
        for limit in LIMITS:
            room = model.room(0)
            sequences = room if limit is None else min(limit, room)
            best: tuple[float, int, Way] | None = None
            for attention in range(1, MOST_RATIO * model.gpus + 1):
                try:
                    way = apart(model, attention, sequences, known)
                except ValueError:
                    break
                rate = way.sequences / way.step / (attention + model.gpus)
                if best is None or rate > best[0]:
                    best = rate, attention, way
            assert best is not None
            rate, attention, way = best
            gpus = attention + model.gpus
            found: Row = {
                "model": model.name, "sequences": sequences, "attention": attention, "experts": model.gpus,
                "step_ms": way.step * 1e3, "rate": rate,
            }  # fmt: skip
            for name, group in (("groups", model.gpus), ("one_group", gpus)):
                other = inside(model, group, way.sequences / gpus, known)
                found[f"{name}_sequences"] = other.sequences / group
                found[f"{name}_step_ms"] = other.step * 1e3
                found[f"{name}_rate"] = other.sequences / other.step / group
            yield found


_COLUMNS: Columns = {
    "model": "{model}",
    "sequences on a GPU": "{sequences}; {groups_sequences:.0f}; {one_group_sequences:.0f}",
    "GPUs": "{attention} + {experts}",
    "fed by one": lambda row: f"{row['attention'] / row['experts']:.1f}",
    "apart": "{rate:.0f} ({step_ms:.0f})",
    "in groups": "{groups_rate:.0f} ({groups_step_ms:.0f})",
    "apart over that": lambda row: f"{row['rate'] / row['groups_rate']:.2f}",
    "in one group": "{one_group_rate:.0f} ({one_group_step_ms:.0f})",
    "apart over it": lambda row: f"{row['rate'] / row['one_group_rate']:.2f}",
}


def when_it_pays(results: Path) -> str:
    """The table."""
    return lines(list(rows(measured(results))), _COLUMNS)


SECTIONS: dict[str, Section] = {"when-it-pays": when_it_pays}
