"""Mixtral: softmax over the logits of the chosen experts. Source: transformers 5.23, mixtral."""

from expertd.limits import MAX_EXPERTS
from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.model import MoEModel, Names


def read(config: Config) -> MoEModel:
    return MoEModel(
        layers=tuple(range(config.integer("num_hidden_layers"))),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts", least=1, most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", least=1),
        routing={"scoring_func": "softmax", "renormalize": True},  # equals softmax over the chosen experts
        names=Names("block_sparse_moe", "w1", "w3", "w2"),
    )
