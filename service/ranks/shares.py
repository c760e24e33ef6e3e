"""What each device holds of all layers, and the memory for it: by arithmetic, before anything is loaded."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expertd.backends import Capabilities
from expertd.kernels.rank_memory import part_bytes
from expertd.limits import MAX_RANKS
from expertd.service.device import device_of
from expertd.service.device.cuda import num_gpus
from expertd.service.device.gpu_memory import free_gpu_bytes
from expertd.service.device.host_memory import free_host_bytes
from expertd.service.engine.layers import rule_of
from expertd.service.engine.memory_needs import (
    check_expert_slots,
    expert_slots,
    needs_of_models,
    with_fewer_tokens,
)
from expertd.service.moe.needs import TOKEN_COUNTS, Needs
from expertd.service.moe.placement import contiguous_placement
from expertd.service.moe.separate import rows_per_token
from expertd.service.moe.split import experts_of_rank, part_of
from expertd.service.settings.checks import disagreements
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings
from expertd.service.settings.spans import numbers, spans
from expertd.weight_format import WeightFormat

_FEWEST_TOKENS = 64  # of a step that is worth a hint
_BUDGET_STEP = 100_000_000


class ExchangeSizes(NamedTuple):
    """Arguments of `RankMemory`. Layers of one partition with the same sizes share one."""

    max_own_tokens: int
    max_tokens: int
    hidden_size: int
    top_k: int

    @classmethod
    def of(cls, settings: Settings, model: ModelSettings) -> "ExchangeSizes":
        """Those of a model; where weights multiply the experts' input, a slot counts as a token."""
        each = rows_per_token(model.top_k, rule_of(model))
        own = max_rank_tokens(settings) * each
        return cls(own, settings.num_ranks * own, model.hidden_size, model.top_k // each)


def max_rank_tokens(settings: Settings) -> int:
    """Of a rank in a step, or in a graph, which pads it."""
    return max(len(part_of(settings.limits.max_batch_tokens, 0, settings.num_ranks)), TOKEN_COUNTS[-1])


def exchange_bytes(settings: Settings) -> int:
    """Bytes on each GPU for the exchanges of all models; 0 between nodes, which exchange by NCCL."""
    if settings.nnodes > 1:
        return 0
    each = {(model.partition, ExchangeSizes.of(settings, model)) for model in settings.models}
    exact = settings.combines_exactly
    return sum(sum(part_bytes(settings.num_ranks, *sizes, exact)) for _, sizes in each)


@dataclass(frozen=True)
class Share:
    """A device's part: names of models by what it holds of them, its memory, and that of an exchange."""

    held: dict[str, tuple[str, ...]]
    needs: Needs
    exchange: int = 0

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.needs.total + self.exchange

    @property
    def text(self) -> str:
        """For people."""
        parts = [f"{_layers(names)}: {what}" for what, names in self.held.items()] or ["no layer at first"]
        memory = f"weights {size(self.needs.weights)}, steps {size(self.needs.steps)}"
        memory += f", graphs {size(self.needs.graphs)}" if self.needs.graphs else ""
        memory += f", exchange {size(self.exchange)}" if self.exchange else ""
        return f"{'; '.join(parts)}: {size(self.num_bytes)} ({memory})"


def shares_of(settings: Settings, capabilities: Capabilities) -> list[Share]:
    """The share of each rank; of the only device if there are no ranks."""
    return [_share(settings, rank, capabilities) for rank in range(settings.num_ranks)]


def experts_of(settings: Settings, model: ModelSettings, rank: int) -> Sequence[int]:
    """The routed experts of `model` that a rank holds at first, replicas included."""
    if settings.num_ranks == 1:
        return model.shape.held_experts
    physical: Sequence[int] = model.shape.held_experts
    if settings.placement.policy is not None:
        slots = model.num_experts + settings.placement.replicas
        placement = contiguous_placement(model.num_experts, settings.num_ranks, slots)
        physical = placement.physical_to_logical.tolist()
    return experts_of_rank(physical, rank, settings.num_ranks)


def free_bytes(settings: Settings, capabilities: Capabilities) -> list[int | None]:
    """The free memory for each rank of this node. CPU ranks share it evenly.

    None: it has no such GPU, or that cannot be asked without a context on it; see `free_gpu_bytes`.
    """
    if not capabilities.on_gpu:
        return [free_host_bytes() // settings.ranks_per_node] * settings.ranks_per_node
    if settings.devices is not None:
        return free_gpu_bytes(numbers(settings.devices))
    # This process will have a context on the GPU in any case, and then it is no longer part of what is free.
    return [device_of("cuda:0").free_bytes() if num_gpus() else None]


def check_device_memory(settings: Settings, capabilities: Capabilities) -> None:
    """Raise MemoryError, with the numbers, if what a device of this node is to hold does not fit there."""
    for rank, share, free in shares_here(settings, capabilities):
        if free is not None and share.num_bytes > free:
            name = f"memory, rank {rank}" if settings.num_ranks > 1 else "memory"
            hint = what_would_do(settings, capabilities, free)
            raise MemoryError(f"{name}: expected room for {share.text}, got {size(free)} free{hint}")


def shares_here(settings: Settings, capabilities: Capabilities) -> Iterator[tuple[int, Share, int | None]]:
    """The ranks of this node: their numbers, shares, and free memory."""
    first = settings.node_rank * settings.ranks_per_node
    own = shares_of(settings, capabilities)[first : first + settings.ranks_per_node]
    yield from zip(range(first, first + len(own)), own, free_bytes(settings, capabilities), strict=True)


def what_would_do(settings: Settings, capabilities: Capabilities, available: int) -> str:
    """A hint: a change of the settings with which everything would fit; empty if none is known."""
    hint = more_ranks(settings, capabilities, available) or fewer_tokens(settings, capabilities, available)
    return hint + smaller_budget(settings, capabilities, available)


def fewer_tokens(settings: Settings, capabilities: Capabilities, available: int) -> str:
    """A hint: how many tokens a step may have, with this free memory for a rank; empty if none would do."""
    tokens = settings.limits.max_batch_tokens // 2
    while tokens >= _FEWEST_TOKENS:
        shares = shares_of(with_fewer_tokens(settings, tokens), capabilities)
        if all(share.num_bytes <= available for share in shares):
            too_long = " and max_request_tokens" if settings.limits.max_request_tokens > tokens else ""
            return f"; limits.max_batch_tokens{too_long} of {tokens} would do"
        tokens //= 2
    return ""


def smaller_budget(settings: Settings, capabilities: Capabilities, available: int) -> str:
    """A hint: a `weights_budget` with which a GPU with this free memory would do; empty if none would."""
    budget = budget_within(settings, capabilities, available)
    if budget is None:
        return ""
    return f"; weights_budget of {size(budget)} would do, with all experts in the host's memory"


def budget_within(settings: Settings, capabilities: Capabilities, available: int) -> int | None:
    """A `weights_budget` with which these layers fill the free memory of a GPU; None if there is none."""
    if not capabilities.on_gpu:
        return None
    budget = available // _BUDGET_STEP * _BUDGET_STEP
    while budget > 0:
        changed = settings.model_copy(update={"weights_budget": budget})
        try:
            check_expert_slots(changed, capabilities)
        except ValueError:
            return None
        if any(disagreements(changed)):
            return None
        share = _share(changed, 0, capabilities)  # the largest; has fewer graphs once the budget is in use
        if share.num_bytes <= available:
            return budget
        budget -= -(-(share.num_bytes - available) // _BUDGET_STEP) * _BUDGET_STEP
    return None


def more_ranks(settings: Settings, capabilities: Capabilities, available: int) -> str:
    """A hint: how many ranks, each with this free memory, would do; empty if no number would."""
    if capabilities.on_gpu and not capabilities.joint_exchange:
        return ""
    for count in range(settings.num_ranks + 1, MAX_RANKS + 1):
        update = {"devices": f"0-{count - 1}"} if capabilities.on_gpu else {"ranks": count}
        try:
            shares = shares_of(settings.model_copy(update=update | {"nnodes": 1}), capabilities)
        except ValueError:
            break  # fewer experts than ranks
        room = available if capabilities.on_gpu else available * settings.ranks_per_node // count
        if all(share.num_bytes <= room for share in shares):
            return f"; {count} such {'GPUs' if capabilities.on_gpu else 'ranks'} would do"
    return ""


def _share(settings: Settings, rank: int, capabilities: Capabilities) -> Share:
    held, numbers_held = defaultdict[str, list[str]](list), []
    slots = expert_slots(settings, capabilities)
    for model in (model for model in settings.models if model.load):
        experts = experts_of(settings, model, rank)
        shared = ""
        if model.num_shared_experts:
            word = "and" if model.shared_experts else "without the"
            shared = f" {word} {model.num_shared_experts} shared"
        layout = model.shape.weight_layout.format
        form = "" if layout is WeightFormat.FP8 else f" in {layout}"
        in_slots = f", {slots[model.name]} at a time" if model.name in slots else ""
        what = f"experts {spans(set(experts))} of {model.num_experts}{form}{in_slots}{shared}"
        held[what].append(model.name)
        numbers_held.append((model, len(experts)))
    exchange = exchange_bytes(settings) if capabilities.on_gpu and settings.num_ranks > 1 else 0
    names = {what: tuple(names) for what, names in held.items()}
    return Share(names, needs_of_models(settings, numbers_held, capabilities), exchange)


def _layers(names: Sequence[str]) -> str:
    """Names, with the numbers of a checkpoint's layers together."""
    numbered, others = defaultdict[str, list[int]](list), []
    for name in names:
        prefix, found, number = name.rpartition(".layers.")
        if found and number.isdecimal():
            numbered[prefix].append(int(number))
        else:
            others.append(name)
    return ", ".join([*(f"{prefix}.layers.{spans(layers)}" for prefix, layers in numbered.items()), *others])


def size(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
