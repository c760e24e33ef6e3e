"""Refuses tensors of a layer's block that nothing uses: the model would compute something else."""

import re
from collections.abc import Set

from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.encodings import UNUSED
from expertd.service.checkpoints.files import TensorFiles
from expertd.service.checkpoints.model import MoEModel

_MOST_NAMED = 3
# The parts of a layer that may belong to its MoE block; not norms, nor what mixes residual streams (hc).
_COMPUTES = re.compile(r"(?!\w*(?:norm|hc))\w*(?:mlp|moe|expert|router|feed_forward|ffn)")
# The tensors of a weight, in every encoding; of an expert that is held here, all are used or refused.
_SUFFIXES = (
    "weight", "weight_scale_inv", "weight_scale", "scale", "weight_scale_2", "weight_packed",
    "weight_global_scale", *UNUSED,
)  # fmt: skip


def check_names(files: TensorFiles, model: MoEModel, start: str, used: Set[str]) -> None:
    """Raise CheckpointError if the layer whose names begin with `start` has unknown tensors in its MoE block.

    Or beside it, in a part that looks like one.

    used  the names that have been found. The other experts', which are held elsewhere, are known, too
    """
    names = model.names
    unknown = sorted(
        name
        for name in files.under(start) - used
        if _COMPUTES.match(name.removeprefix(start))
        and not _is_elsewhere(model, start, name.removeprefix(start), used)
    )
    if not unknown:
        return
    named, more = ", ".join(unknown[:_MOST_NAMED]), len(unknown) - _MOST_NAMED
    got = f"{named} and {more} more" if more > 0 else named
    shared = " and a shared one" if model.num_shared_experts else ""
    raise CheckpointError(
        f"{files.directory}: {start}{names.experts.rpartition('.')[0]}: expected only a router and "
        f"{model.num_experts} experts{shared} as in {model.family}, got {got}"
    )


def _is_elsewhere(model: MoEModel, start: str, name: str, used: Set[str]) -> bool:
    """Whether `name` is of one of the model's experts, or the shared one, that is not held here."""
    names = model.names
    if name == names.shared_gate and model.num_shared_experts:
        return True  # found if the shared expert is held here
    found = re.match(rf"{re.escape(names.experts)}\.(0|[1-9]\d*)\.", name)
    if found and int(found[1]) < model.num_experts:
        expert, projections = found[0], names.projections
    elif model.num_shared_experts and name.startswith(f"{names.shared}."):
        expert, projections = f"{names.shared}.", names.shared_projections or names.projections
    else:
        return False
    if any(f"{start}{expert}{projections[0]}.{suffix}" in used for suffix in ("weight", "weight_packed")):
        return False  # it is held here
    return name in {f"{expert}{projection}.{suffix}" for projection in projections for suffix in _SUFFIXES}
