"""Qwen3-MoE: softmax over all experts; some layers may be dense. Source: transformers 5.23, qwen3_moe."""

from expertd.limits import MAX_EXPERTS
from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.model import MoEModel, Names


def read(config: Config) -> MoEModel:
    every = config.integer("decoder_sparse_step", default=1, least=1)
    dense = set(config.integers("mlp_only_layers"))
    return MoEModel(
        layers=tuple(
            layer
            for layer in range(config.integer("num_hidden_layers"))
            if (layer + 1) % every == 0 and layer not in dense
        ),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("moe_intermediate_size"),
        num_experts=config.integer("num_experts", "num_local_experts", least=1, most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", least=1),
        routing={"scoring_func": "softmax", "renormalize": config.boolean("norm_topk_prob", default=False)},
        names=Names("mlp"),
    )
