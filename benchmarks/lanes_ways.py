"""The layers of `benchmarks.lanes`, and the ways to serve decode beside prefill, as settings of a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "layer"
DEEPSEEK = {
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "num_expert_groups": 8,
    "topk_group": 4,
}


class Layer(NamedTuple):
    """A layer's sizes, and the tokens of requests and chunks."""

    hidden: int
    intermediate: int
    experts: int
    routing: dict[str, Any]
    prefill: int = 4096
    decode: tuple[int, ...] = (64, 1)
    chunks: tuple[int, ...] = (512, 1024, 2048)
    top_k: int = 8


LAYERS = {
    "deepseek-v3/ep8": Layer(7168, 2048, 32, DEEPSEEK),
    "deepseek-v3": Layer(7168, 2048, 256, DEEPSEEK),
    "qwen3-30b-a3b": Layer(2048, 768, 128, {}),
    "tiny": Layer(256, 128, 8, {}, 256, (8, 1), (64,), 2),
}
SPLITS = (16, 32, 48, 64, 80)


class Way(NamedTuple):
    """How decode and prefill are served.

    split  the SMs of the decode lane; None: the lanes share all
    """

    name: str
    chunk: int = 0
    joins: bool = False
    lanes: bool = False
    split: int | None = None


ALONE = Way("alone")


def ways(layer: Layer, splits: Sequence[int]) -> list[Way]:
    """All ways; those with the same settings follow each other. In turns without chunks comes first."""
    return [
        Way("turns"),
        Way("joined", joins=True),
        *(Way(f"turns, chunks of {chunk}", chunk) for chunk in layer.chunks),
        *(Way(f"joined, chunks of {chunk}", chunk, joins=True) for chunk in layer.chunks),
        Way("lanes on all SMs", lanes=True),
        *(Way(f"lanes, {split} SMs for decode", lanes=True, split=split) for split in splits),
    ]


def settings_of(layer: Layer, way: Way, folder: Path, spin: int | None = None) -> dict[str, Any]:
    """The settings of a server, but its port; the split is changed while it runs.

    spin: its channels.spin_microseconds
    """
    # A joined step has a whole request of prefill, or a chunk of it, and all decode tokens.
    room = max(layer.decode) if way.joins and not way.chunk else 0
    limits = {
        "max_request_tokens": layer.prefill,
        "max_batch_tokens": layer.prefill + room,
        "prefill_chunk_tokens": way.chunk,
        "join_chunks": way.joins,
    }
    model = {
        "name": MODEL,
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "num_experts": layer.experts,
        "top_k": layer.top_k,
        "routing": layer.routing,
    }
    channels = {"socket": str(folder / "channels"), "spin_microseconds": spin}
    settings = {"models": [model], "limits": limits, "channels": channels}
    if way.lanes:
        lanes: dict[str, Any] = {"decode_max_tokens": max(layer.decode)}
        if way.split is not None:
            lanes |= {"decode_partition": "decode", "prefill_partition": "prefill"}
            settings["partitions"] = {"decode": 48, "prefill": 64}
        settings["lanes"] = lanes
    return settings
