"""MiniMax-M2: sigmoid scores, a bias, no groups, no shared expert. Source: transformers 5.23, minimax_m2."""

from expertd.limits import MAX_EXPERTS
from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.model import MoEModel, Names


def read(config: Config) -> MoEModel:
    config.expect("scoring_func", "sigmoid")
    config.expect("use_routing_bias", True)
    config.expect("shared_intermediate_size", 0)
    return MoEModel(
        layers=tuple(range(config.integer("num_hidden_layers"))),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts", least=1, most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", least=1),
        routing={"scoring_func": "sigmoid", "renormalize": True},
        names=Names("block_sparse_moe", "w1", "w3", "w2", router_bias="e_score_correction_bias"),
    )
