"""The spellings of config.json's keys, which differ between families for one and the same value."""

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
SCALE = (
    "routed_scaling_factor",
    "moe_routed_scaling_factor",
    "moe_router_scaling_factor",
    "router_scaling_factor",
    "route_scale",
)
RENORMALIZE = ("norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight")
GROUPS = ("n_group", "num_expert_group")
TOP_GROUPS = ("topk_group",)
SCORING = ("scoring_func", "score_function", "score_func", "moe_router_activation_func")
NEXT_TOKEN = ("num_nextn_predict_layers",)

RULE = (*EXPERTS, *TOP_K, *SHARED, *SCALE, *RENORMALIZE, *GROUPS, *TOP_GROUPS, *SCORING)
"""Keys that decide what a layer computes: null is refused unless the family gives it a meaning."""
