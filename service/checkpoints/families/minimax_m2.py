"""MiniMax-M2: sigmoid scores, a bias, no groups, no shared expert. Source: transformers 5.23, minimax_m2."""

from service.checkpoints.config import Config
from service.checkpoints.model import MoEModel, Names


def read(config: Config) -> MoEModel:
    config.expect("scoring_func", "sigmoid")
    if config.integer("shared_intermediate_size", default=0):
        raise config.error("shared_intermediate_size: expected 0, for no code says how it is added")
    return MoEModel(
        layers=tuple(range(config.integer("num_hidden_layers"))),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        routing={"scoring": "sigmoid", "renormalize": True},
        names=Names("block_sparse_moe", "w1", "w3", "w2", router_bias="e_score_correction_bias"),
    )
