"""The settings of lanes: short and long requests in steps of their own, which run at the same time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from expertd.service.settings.parts import Frozen, Limits

if TYPE_CHECKING:
    from expertd.service.settings.model import Settings


LANES = ("decode", "prefill")


class LaneSettings(Frozen):
    """Two lanes, each with queues and steps of its own: `decode` for short requests, `prefill` for others."""

    decode_max_tokens: int = Field(
        default=0,
        ge=0,
        description="maximum tokens of a request on the decode lane, whose steps run beside those of the "
        "prefill lane (docs/scheduling.md); 0: there are no lanes, and all steps take turns",
    )
    decode_batch_tokens: int = Field(
        default=256, ge=1, description="maximum tokens of a step on the decode lane"
    )
    decode_partition: str | None = Field(
        default=None, description="name of the SM partition of the decode lane; null: the whole device"
    )
    prefill_partition: str | None = Field(
        default=None, description="name of the SM partition of the prefill lane; null: the whole device"
    )

    @property
    def are_on(self) -> bool:
        """Whether there are lanes."""
        return self.decode_max_tokens > 0

    @property
    def partitions(self) -> dict[str, str]:
        """The partitions that lanes run in, by the setting that names them."""
        named = {"decode_partition": self.decode_partition, "prefill_partition": self.prefill_partition}
        return {setting: name for setting, name in named.items() if name is not None}


class Lane(NamedTuple):
    """One lane: the limits of its queues and steps, and the partition that it runs in.

    name        "" if there is only this one
    partition   of all models; None: each model's own
    is_prefill  whether its steps are long; a small one is rare, and has no CUDA graph, which takes memory
    """

    name: str
    limits: Limits
    partition: str | None = None
    is_prefill: bool = False


def lanes_of(settings: "Settings") -> tuple[Lane, ...]:
    """The lanes of a server, that of the shortest requests first; one without a name if there are none."""
    lanes, limits = settings.lanes, settings.limits
    if not lanes.are_on:
        return (Lane("", limits),)
    batch = min(lanes.decode_batch_tokens, limits.max_batch_tokens)
    # Its requests are no longer than a step, so none is computed in chunks.
    short = limits.model_copy(update={"max_batch_tokens": batch, "prefill_chunk_tokens": 0})
    return (
        Lane(LANES[0], short, lanes.decode_partition),
        Lane(LANES[1], limits, lanes.prefill_partition, is_prefill=True),
    )


def wrong_lanes(settings: "Settings") -> Iterator[str]:
    """What does not fit the lanes, as sentences (name, expected, got)."""
    lanes = settings.lanes
    if not lanes.are_on:
        for setting, name in lanes.partitions.items():
            yield f"lanes.{setting}: expected null with lanes.decode_max_tokens 0, got {name!r}"
        return
    if settings.num_ranks > 1:
        yield f"lanes.decode_max_tokens: expected 0 with several ranks, got {lanes.decode_max_tokens}"
    loads = {"models": [model.load for model in settings.models]}
    loads["checkpoints"] = [checkpoint.load for checkpoint in settings.checkpoints]
    for kind, given in loads.items():
        for number, load in enumerate(given):
            if not load:
                yield f"{kind}.{number}.load: expected true with lanes, got false"
    batch = min(lanes.decode_batch_tokens, settings.limits.max_batch_tokens)
    if lanes.decode_max_tokens > batch:
        expected = f"at most decode_batch_tokens and limits.max_batch_tokens ({batch})"
        yield f"lanes.decode_max_tokens: expected {expected}, got {lanes.decode_max_tokens}"
    for setting, name in lanes.partitions.items():
        if name not in settings.partitions:
            expected = f"one of partitions ({', '.join(settings.partitions) or 'none'})"
            yield f"lanes.{setting}: expected {expected}, got {name!r}"
    if lanes.decode_partition is not None and lanes.decode_partition == lanes.prefill_partition:
        expected = "another one than decode_partition"
        yield f"lanes.prefill_partition: expected {expected}, got {lanes.prefill_partition!r}"
    served = [(f"models.{number}", model.partition) for number, model in enumerate(settings.models)]
    served += [(f"checkpoints.{number}", each.partition) for number, each in enumerate(settings.checkpoints)]
    for key, partition in served:
        if partition is not None:
            yield f"{key}.partition: expected null with lanes, got {partition!r}"
