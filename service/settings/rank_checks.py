"""What several ranks cannot serve, as sentences (name, expected, got)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertd.backends import BACKENDS, with_joint_exchange
from expertd.limits import MAX_EXPERTS, MAX_RANK_PAIRS, MAX_RANKS

if TYPE_CHECKING:
    from expertd.service.settings.model import Settings
    from expertd.service.settings.served import ModelSettings


def wrong_ranks(settings: "Settings") -> Iterator[str]:
    """What does not fit the number of ranks, or the GPUs."""
    count = settings.num_ranks
    if settings.devices is not None:
        if settings.backend != "auto" and not BACKENDS[settings.backend].joint_exchange:
            yield f"devices: expected backend {with_joint_exchange()}, got {settings.backend!r}"
        if count < 2:
            yield f"devices: expected two GPUs or more, got {settings.devices}"
        if count > MAX_RANKS and settings.nnodes == 1:
            yield f"devices: expected at most {MAX_RANKS} GPUs of a host, got {count}"
        if settings.ranks not in (1, settings.ranks_per_node):
            expected = f"the number of devices ({settings.ranks_per_node})"
            yield f"ranks: expected {expected}, got {settings.ranks}"
    if settings.overlap.mode == "always" and (settings.devices is None or settings.nnodes > 1):
        yield "overlap.mode: expected auto or never without GPUs of one machine (devices), got 'always'"
    yield from _wrong_placement(settings)
    if settings.devices is not None and settings.nnodes == 1 and settings.models:
        most = max(settings.models, key=_top_k)
        tokens, got = MAX_RANK_PAIRS // most.top_k * count, settings.limits.max_batch_tokens
        if got > tokens:
            expected = f"at most {tokens} on {count} GPUs with the top_k of model {most.name} ({most.top_k})"
            yield f"limits.max_batch_tokens: expected {expected}, got {got}"
    if count == 1:
        return
    for number, model in enumerate(settings.models):
        key = f"models.{number}"
        yield from _wrong_layers(settings, key, "local_experts", model.local_experts, model.masked_max_tokens)
        if not model.load:
            yield f"{key}.load: expected true with several ranks, got false"
    # The model with fewest experts is enough: the layers of a checkpoint have equally many.
    fewest = min(settings.models, key=_num_held, default=None)
    if fewest is not None and _num_held(fewest) < count:
        expected = f"at most the number of experts of model {fewest.name} ({_num_held(fewest)})"
        yield f"ranks: expected {expected}, got {count}"
    for number, served in enumerate(settings.checkpoints):
        key = f"checkpoints.{number}"
        yield from _wrong_layers(settings, key, "experts", served.experts, served.masked_max_tokens)
        if not served.load:
            yield f"{key}.load: expected true with several ranks, got false"


def _num_experts(model: "ModelSettings") -> int:
    return model.num_experts


def _top_k(model: "ModelSettings") -> int:
    return model.top_k


def _num_held(model: "ModelSettings") -> int:
    return len(model.shape.held_experts)


def _wrong_layers(
    settings: "Settings", key: str, name: str, held: str | None, masked_max_tokens: int
) -> Iterator[str]:
    """Why ranks cannot share the layers, of whose experts the setting `name` holds a part."""
    if held is not None and settings.placement.policy is not None:
        yield f"{key}.{name}: expected null with placement.policy, got {held}"
    if masked_max_tokens:
        yield f"{key}.masked_max_tokens: expected 0 with several ranks, got {masked_max_tokens}"


def _wrong_placement(settings: "Settings") -> Iterator[str]:
    policy, replicas = settings.placement.policy, settings.placement.replicas
    if policy is None and replicas:
        yield f"placement.replicas: expected 0 without placement.policy, got {replicas}"
        return
    if settings.devices is not None and settings.nnodes > 1 and policy is not None:
        yield f"placement.policy: expected null with GPUs of several nodes, got {policy!r}"
    if settings.num_ranks == 1 and policy is not None:
        yield f"placement.policy: expected null with one rank, got {policy!r}"
        return
    if not settings.models:
        return
    largest = max(settings.models, key=_num_experts)
    if settings.devices is not None and largest.num_experts + replicas > MAX_EXPERTS:
        what = f"{MAX_EXPERTS - largest.num_experts} on GPUs with model {largest.name}"
        yield f"placement.replicas: expected at most {what}, got {replicas}"
    smallest = min(settings.models, key=_num_experts)
    most = smallest.num_experts * (settings.num_ranks - 1)
    if replicas > most:
        what = f"{most}, with which every rank has all experts of model {smallest.name}"
        yield f"placement.replicas: expected at most {what}, got {replicas}"
