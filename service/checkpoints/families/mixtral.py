"""Mixtral: the softmax of the chosen experts' logits. Source: transformers 5.23, mixtral."""

from service.checkpoints.config import Config
from service.checkpoints.model import MoEModel, Names


def read(config: Config) -> MoEModel:
    return MoEModel(
        layers=tuple(range(config.integer("num_hidden_layers"))),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        routing={"scoring": "softmax", "renormalize": True},  # which is that of the chosen ones
        names=Names("block_sparse_moe", "w1", "w3", "w2"),
    )
