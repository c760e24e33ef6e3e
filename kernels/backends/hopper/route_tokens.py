"""Launches csrc/route_tokens.cu: each token's experts and their weights from its logits."""

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper import router_logits
from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source
from expertd.kernels.backends.hopper.router_logits import Logits
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.limits import MAX_EXPERTS
from expertd.routing import Routing

_WARP = 32


def _shared_bytes(num_experts: int) -> int:
    return 3 * (num_experts + num_experts % 2) * 4  # scores, biases and keys


def _variant(suffix: str, biases_logits: bool) -> Variant:
    source = named_source("route_tokens", suffix, SUMS=router_logits.SUMS, LOGIT_BIAS=int(biases_logits))
    return Variant(source, 128, _shared_bytes)


VARIANTS = {"choice": _variant("", False), "logits": _variant("logit_bias", True)}
"""Variants by `Routing.bias_on`."""


def can_route(num_experts: int, top_k: int, routing: Routing) -> bool:
    """Whether the kernel supports this rule: a warp needs a lane for each slot and for each expert group."""
    return (
        routing.in_kernels and max(top_k, routing.num_expert_groups) <= _WARP and num_experts <= MAX_EXPERTS
    )


def route_tokens(
    kernels: Kernels,
    on: OnStream,
    logits: Logits,
    router_bias: Tensor | None,
    top_k: int,
    routing: Routing,
    end_token: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(topk_ids int32 [T, top_k], topk_weights fp32 [T, top_k]); see `choose_experts` and `Backend.route`.

    With more than one sum per part, the preceding launch must not write router_bias: it is read before that
    launch ends.
    """
    partial_sums, num_tokens, num_experts = logits.data.shape
    topk_ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.data.device)
    topk_weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.data.device)
    kernels.launch(
        on, VARIANTS[routing.bias_on], Grid(num_tokens, shared_bytes=_shared_bytes(num_experts)),
        logits.data, np.int32(partial_sums // logits.sums), np.int32(logits.sums),
        np.int32(logits.sums > 1), router_bias, np.int32(num_experts), np.int32(top_k),
        np.int32(routing.scoring_func == "softmax"), np.int32(routing.renormalize),
        np.float32(routing.routed_scaling_factor),
        np.int32(routing.num_expert_groups), np.int32(routing.topk_group),
        end_token, topk_ids, topk_weights,
    )  # fmt: skip
    return topk_ids, topk_weights
