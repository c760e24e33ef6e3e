"""DeepSeek-V3 and R1, and Kimi-K2, which has the same architecture.

Source: transformers 5.23, deepseek_v3; and the models' modeling_deepseek.py, for moe_layer_freq and the
multi-token prediction layers, which follow the others.
"""

from expertd.limits import MAX_EXPERTS
from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.model import MoEModel, Names


def read(
    config: Config,
    *,
    first_k_dense_replace: int = 3,
    routed_scaling_factor: float = 2.5,
    n_group: int = 8,
    topk_group: int = 4,
) -> MoEModel:
    """The keyword arguments are the defaults of values that config.json omits."""
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    begin = config.integer("first_k_dense_replace", default=first_k_dense_replace)
    num_layers = config.integer("num_hidden_layers")
    end = num_layers + config.integer("num_nextn_predict_layers", default=0)
    every = config.integer("moe_layer_freq", default=1, least=1)
    shared = 0 if config.is_null("n_shared_experts") else config.integer("n_shared_experts", default=1)
    return MoEModel(
        layers=tuple(layer for layer in range(begin, end) if layer % every == 0),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("moe_intermediate_size"),
        num_experts=config.integer("n_routed_experts", "num_local_experts", least=1, most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", least=1),
        num_shared_experts=shared,
        routing={
            "scoring_func": "sigmoid",
            "renormalize": config.boolean("norm_topk_prob", default=True),
            "routed_scaling_factor": config.number("routed_scaling_factor", default=routed_scaling_factor),
            "num_expert_groups": config.integer("n_group", default=n_group, least=1),
            "topk_group": config.integer("topk_group", default=topk_group, least=1),
        },
        next_token_layers=range(num_layers, end),
        names=Names("mlp", router_bias="gate.e_score_correction_bias", shared="shared_experts"),
    )
