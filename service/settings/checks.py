"""What does not fit together in the settings, as sentences (name, expected, got)."""

from collections import Counter
from collections.abc import Iterator, Sequence

from expertd.backends import BACKENDS, with_joint_exchange
from expertd.limits import MAX_EXPERTS, MAX_RANK_PAIRS, MAX_RANKS
from expertd.service.settings.fields import Fields
from expertd.service.settings.parts import AUTO, MAX_PARTITION_NAME, MAX_PARTITIONS
from expertd.service.settings.served import CheckpointSettings, ModelSettings
from expertd.service.util.sentences import shown


def disagreements(settings: Fields) -> Iterator[str]:
    """All of them."""
    yield from _wrong_names(settings)
    yield from _wrong_addresses(settings)
    yield from _wrong_partitions(settings, "models", settings.models)
    yield from _wrong_partitions(settings, "checkpoints", settings.checkpoints)
    yield from _wrong_nodes(settings)
    yield from _wrong_ranks(settings)
    yield from _wrong_lanes(settings)
    yield from _wrong_buffers(settings)
    yield from _wrong_budget(settings)


def _wrong_names(settings: Fields) -> Iterator[str]:
    if not settings.models and not settings.checkpoints:
        yield "models or checkpoints: expected at least one layer to serve, got none"
    if settings.tls.is_on and settings.uds is not None:
        yield f"tls: expected host and port, got uds {settings.uds}, which only this user can connect to"
    for name, count in Counter(model.name for model in settings.models).items():
        if count > 1:
            yield f"models: expected different names, got {name!r} {count} times"
    if (count := len(settings.partitions)) > MAX_PARTITIONS:
        yield f"partitions: expected at most {MAX_PARTITIONS}, got {count}"
    for partition, sms in settings.partitions.items():
        if len(partition) > MAX_PARTITION_NAME:
            expected = f"a name of at most {MAX_PARTITION_NAME} characters"
            yield f"partitions: expected {expected}, got {shown(partition)}"
        if sms < 1:
            yield f"partitions.{partition}: expected at least 1 SM, got {sms}"


def _wrong_addresses(settings: Fields) -> Iterator[str]:
    port, uds, channels = settings.grpc.port, settings.uds, settings.channels.socket
    if port and uds is None and port == settings.port:
        yield f"grpc.port: expected another port than port ({settings.port}), got {port}"
    if uds is None or channels is None or channels == AUTO:
        return
    if uds.absolute() == channels.absolute():
        yield f"channels.socket: expected another path than uds ({uds}), got {channels}"


def _wrong_partitions(
    settings: Fields, key: str, served: Sequence[ModelSettings | CheckpointSettings]
) -> Iterator[str]:
    expected = f"one of partitions ({', '.join(settings.partitions) or 'none'})"
    for number, entry in enumerate(served):
        if entry.partition is not None and entry.partition not in settings.partitions:
            yield f"{key}.{number}.partition: expected {expected}, got {entry.partition!r}"


def _wrong_nodes(settings: Fields) -> Iterator[str]:
    if settings.node_rank >= settings.nnodes:
        yield f"node_rank: expected less than nnodes ({settings.nnodes}), got {settings.node_rank}"
    if settings.nnodes > 1 and settings.rendezvous is None:
        yield f"rendezvous: expected HOST:PORT with nnodes {settings.nnodes}, got none"
    if settings.nnodes == 1 and settings.rendezvous is not None:
        yield f"nnodes: expected 2 or more with rendezvous {settings.rendezvous}, got 1"


def _wrong_buffers(settings: Fields) -> Iterator[str]:
    needed, got = settings.min_buffered_bytes, settings.buffered_bytes
    if got < needed:
        yield f"limits.max_buffered_bytes: expected at least {needed}, got {got}"


def _wrong_ranks(settings: Fields) -> Iterator[str]:
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
        widest = max(settings.models, key=_top_k)
        tokens, got = MAX_RANK_PAIRS // widest.top_k * count, settings.limits.max_batch_tokens
        if got > tokens:
            expected = (
                f"at most {tokens} on {count} GPUs with the top_k of model {widest.name} ({widest.top_k})"
            )
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


def _num_experts(model: ModelSettings) -> int:
    return model.num_experts


def _top_k(model: ModelSettings) -> int:
    return model.top_k


def _num_held(model: ModelSettings) -> int:
    return len(model.shape.held_experts)


def _wrong_layers(
    settings: Fields, key: str, name: str, held: str | None, masked_max_tokens: int
) -> Iterator[str]:
    """Why ranks cannot share the layers, of whose experts the setting `name` holds a part."""
    if held is not None and settings.placement.policy is not None:
        yield f"{key}.{name}: expected null with placement.policy, got {held}"
    if masked_max_tokens:
        yield f"{key}.masked_max_tokens: expected 0 with several ranks, got {masked_max_tokens}"


def _wrong_placement(settings: Fields) -> Iterator[str]:
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
    limit = smallest.num_experts * (settings.num_ranks - 1)
    if replicas > limit:
        what = f"{limit}, with which every rank has all experts of model {smallest.name}"
        yield f"placement.replicas: expected at most {what}, got {replicas}"


def _wrong_lanes(settings: Fields) -> Iterator[str]:
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


def _wrong_budget(settings: Fields) -> Iterator[str]:
    """What does not fit experts in the host's memory."""
    served: list[tuple[str, ModelSettings | CheckpointSettings]] = [
        *((f"models.{number}", each) for number, each in enumerate(settings.models)),
        *((f"checkpoints.{number}", each) for number, each in enumerate(settings.checkpoints)),
    ]
    own = {key: each.weights_budget for key, each in served if each.weights_budget is not None}
    budgets = {f"{key}.weights_budget": budget for key, budget in own.items()}
    if settings.weights_budget is not None:
        if served and len(own) == len(served):
            expected = "null if all layers have budgets of their own"
            yield f"weights_budget: expected {expected}, got {settings.weights_budget}"
        budgets["weights_budget"] = settings.weights_budget
    if budgets and settings.overlap.mode == "always":
        yield "overlap.mode: expected auto or never with weights_budget, got 'always'"
    for name, budget in budgets.items():
        if settings.lanes.are_on:
            yield f"{name}: expected null with lanes, got {budget}"
    for key, each in served if budgets else ():
        if not each.load:
            yield f"{key}.load: expected true with weights_budget, got false"
        if each.masked_max_tokens and (key in own or settings.weights_budget is not None):
            yield f"{key}.masked_max_tokens: expected 0 with weights_budget, got {each.masked_max_tokens}"
