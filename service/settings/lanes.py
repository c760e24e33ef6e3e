"""The lanes of a server: short and long requests in steps of their own, which run at the same time."""

from typing import NamedTuple

from expertd.service.settings.fields import Fields
from expertd.service.settings.parts import Limits

LANES = ("decode", "prefill")


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


def lanes_of(settings: Fields) -> tuple[Lane, ...]:
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
