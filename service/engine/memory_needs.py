"""The memory that a device needs for the layers that it holds: by arithmetic, before anything is loaded."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from expertd.backends import Capabilities
from expertd.service.checkpoints import CheckpointModelSettings
from expertd.service.engine.layers import has_biases, rule_of
from expertd.service.moe.expert_budget import chunks_bytes, slots_within
from expertd.service.moe.needs import (
    STORE_TOKEN_COUNTS,
    TOKEN_COUNTS,
    Needs,
    needs_of,
    part_of_layer,
    staging_bytes,
    stored_shape,
    together,
)
from expertd.service.moe.separate import has_two_rules
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.batch import FLOATS
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import Limits
from expertd.service.settings.served import ModelSettings


def expert_slots(settings: Settings, capabilities: Capabilities | None) -> dict[str, int]:
    """The slots for routed experts of each layer whose experts are in the host's memory, by its budget.

    capabilities  of the backend that will run; None: none can

    Layers without a budget, or whose experts all fit into it, are left out. All ranks have as many slots as
    one with the most experts. Raises ValueError (name, expected, got).
    """
    slots = dict[str, int]()
    for (setting, budget), models in _budgets(settings).items():
        shapes = {model.name: _of_rank(settings, model, capabilities) for model in models}
        slots |= slots_within(budget, shapes, setting)
    return slots


def _of_rank(settings: Settings, model: ModelSettings, capabilities: Capabilities | None) -> LayerShape:
    """What the store of a rank holds of a model, replicas included; some have one expert less."""
    shape = model.shape if capabilities is None else stored_shape(model.shape, capabilities)
    if settings.num_ranks == 1:
        return shape
    count = len(shape.held_experts) + settings.placement.replicas
    return part_of_layer(shape, -(-count // settings.num_ranks))


def _budgets(settings: Settings) -> dict[tuple[str, int], list[ModelSettings]]:
    """The layers that share a budget, by the name of its setting and its bytes."""
    found = defaultdict[tuple[str, int], list[ModelSettings]](list)
    for number, model in enumerate(settings.models):
        setting, budget = "weights_budget", settings.weights_budget
        if model.weights_budget is not None:
            key = f"models.{number}"
            if isinstance(model, CheckpointModelSettings):
                key = f"checkpoints.{model.checkpoint}"
            setting, budget = f"{key}.weights_budget", model.weights_budget
        if budget is not None:
            found[setting, budget].append(model)
    return found


def check_expert_slots(settings: Settings, capabilities: Capabilities | None) -> None:
    """Raise ValueError (name, expected, got) unless `weights_budget` can be kept. Reads only headers.

    capabilities  of the backend that will run; None: none can
    """
    slots = expert_slots(settings, capabilities)
    for model in (model for model in settings.models if model.name in slots):
        weights = model.shape.weight_layout.format
        is_packed = capabilities is not None and weights in capabilities.stores_packed
        if is_packed and settings.num_ranks > 1 and settings.placement.policy is not None:
            expected = f"null with weights_budget and experts that backend {settings.backend} packs"
            expected += " (requantize: always serves them in FP8)"
            got = f"{settings.placement.policy} with {weights} in model {model.name}"
            raise ValueError(f"placement.policy: expected {expected}, got {got}")
        if settings.num_ranks == 1 and has_two_rules(model.shape, rule_of(model)):
            expected = "layers whose routed and shared experts follow one rule"
            raise ValueError(f"weights_budget: expected {expected}, got others in model {model.name}")


def host_experts_bytes(settings: Settings, capabilities: Capabilities) -> int:
    """Bytes of this node's memory for routed experts that are not all on their device."""
    slots = expert_slots(settings, capabilities)
    num_bytes = 0
    for model in (model for model in settings.models if model.name in slots):
        shape = _of_rank(settings, model, capabilities)
        each = shape.expert_bytes + has_biases(model) * shape.bias_bytes
        num_bytes += settings.ranks_per_node * len(shape.held_experts) * each
    return num_bytes


def needs_of_model(
    settings: Settings,
    model: ModelSettings,
    capabilities: Capabilities,
    num_held: int,
    limits: Limits | None = None,
    staging: int = 0,
    of_all: Mapping[str, int] | None = None,
) -> Needs:
    """What one layer needs.

    num_held  routed experts that the device holds, replicas included
    limits    of the steps; None: those of the settings
    staging   bytes by which memory for all layers grows
    of_all    the slots of all layers; None: `expert_slots`
    """
    slots = (expert_slots(settings, capabilities) if of_all is None else of_all).get(model.name)
    shape = model.shape if slots is None else stored_shape(model.shape, capabilities)
    counts = TOKEN_COUNTS if slots is None else STORE_TOKEN_COUNTS
    has_graphs = settings.nnodes == 1 and (slots is None or settings.num_ranks == 1)
    return needs_of(
        part_of_layer(shape, num_held if slots is None else slots),
        (limits or settings.limits).max_batch_tokens,
        capabilities,
        staging=staging,
        has_biases=has_biases(model),
        weighs_input=rule_of(model).weighs_input,
        keeps_given=settings.placement.policy is not None or slots is not None,
        num_graphs=len(counts) if has_graphs else 0,
        graph_tokens=counts[-1] * settings.num_ranks,
    )


def needs_of_models(
    settings: Settings, held: Sequence[tuple[ModelSettings, int]], capabilities: Capabilities
) -> Needs:
    """What layers need together, of each of which the device holds this many routed experts.

    On a GPU each lane has memory of its own for its steps; a CPU's are small beside the weights.
    """
    slots = expert_slots(settings, capabilities)
    stored = (_of_rank(settings, model, capabilities) for model, _ in held if model.name in slots)
    chunks = chunks_bytes(stored)
    weights = steps = graphs = 0
    for lane in lanes_of(settings) if capabilities.on_gpu else lanes_of(settings)[-1:]:
        needs = together(
            [
                needs_of_model(settings, model, capabilities, number, lane.limits, of_all=slots)
                for model, number in held
            ]
        )
        weights = needs.weights
        steps += needs.steps
        graphs += 0 if lane.is_prefill else needs.graphs
        if capabilities.on_gpu:
            steps += max((staging_of_model(lane.limits, model) for model, _ in held), default=0)
    return Needs(weights + chunks, steps, graphs)


def staging_of_model(limits: Limits, model: ModelSettings) -> int:
    """Bytes on a GPU between steps of a layer and the host."""
    itemsize = FLOATS[model.datatype].itemsize
    return staging_bytes(limits.max_batch_tokens, model.hidden_size, model.top_k, itemsize)


def with_fewer_tokens(settings: Settings, num_tokens: int) -> Settings:
    """With steps of at most `num_tokens`."""
    limits = settings.limits.model_copy(update={"max_batch_tokens": num_tokens})
    return settings.model_copy(update={"limits": limits})
