"""The sizes of what GPUs share for the exchange of a layer."""

from typing import NamedTuple

from expertd.kernels.rank_memory import part_bytes
from expertd.service.engine.layers import rule_of
from expertd.service.moe.needs import GRAPH_TOKENS
from expertd.service.moe.separate import rows_per_token
from expertd.service.moe.split import part_of
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings


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
        own = most_tokens(settings) * each
        return cls(own, settings.num_ranks * own, model.hidden_size, model.top_k // each)


def most_tokens(settings: Settings) -> int:
    """Of a rank in a step, or in a graph, which pads it."""
    return max(len(part_of(settings.limits.max_batch_tokens, 0, settings.num_ranks)), GRAPH_TOKENS)


def exchange_bytes(settings: Settings) -> int:
    """Bytes on each GPU for the exchanges of all models; 0 between nodes, which exchange by NCCL."""
    if settings.nnodes > 1:
        return 0
    each = {(model.partition, ExchangeSizes.of(settings, model)) for model in settings.models}
    exact = settings.combines_exactly
    return sum(sum(part_bytes(settings.num_ranks, *sizes, exact)) for _, sizes in each)
