"""The families whose rules tests/families.py already has, under other names, sizes and spellings."""

from dataclasses import replace
from typing import Any

from expertd.kernels import Routing
from tests.families import EXPERTS, FAMILIES, INTERMEDIATE, TOP_K, FamilyCase
from tests.short import few_of

_LAYERS = {"moe_intermediate_size": INTERMEDIATE, "intermediate_size": 384, "head_dim": 32}
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16,
    "head_dim": ...,
}  # fmt: skip
_INDEXED = _LATENT | {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}
_ROUTED = _LAYERS | {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LOCAL = _LAYERS | {"num_local_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
_NUMBERED = _LAYERS | {"num_experts": EXPERTS}
_LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
_WHOLE: dict[str, Any] = {"intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}

_MORE = {
    "deepseek-v3.2": FamilyCase(
        "deepseek_v32", "DeepseekV32", _ROUTED | _INDEXED | {"n_group": 4, "topk_group": 2},
        Routing("sigmoid", True, 2.5, 4, 2),
    ),
    "glm-5": FamilyCase("glm_moe_dsa", "GlmMoeDsa", _ROUTED | _INDEXED, Routing("sigmoid", True, 2.5)),
    "glm-4.7-flash": FamilyCase(
        "glm4_moe_lite", "Glm4MoeLite", _ROUTED | _LATENT, Routing("sigmoid", True, 1.8)
    ),
    "dots.llm1": FamilyCase(
        "dots1", "Dots1", _ROUTED | {"n_shared_experts": 2, "routed_scaling_factor": 2.5},
        Routing("sigmoid", False, 2.5),
    ),
    "solar-open": FamilyCase("solar_open", "SolarOpen", _ROUTED, Routing("sigmoid")),
    "kimi-k2.5": FamilyCase(
        "kimi_k25", "DeepseekV3", _ROUTED | _LATENT | {"n_group": 1, "topk_group": 1},
        Routing("sigmoid", True, 2.5),
    ),
    "glm-4.5v": FamilyCase(
        "glm4v_moe", "Glm4vMoeText",
        _ROUTED | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
                                       "partial_rotary_factor": 0.5}},
        Routing("sigmoid"), class_name="Glm4vMoeTextModel",
    ),
    "k-exaone": FamilyCase(
        "exaone_moe", "ExaoneMoe", _NUMBERED | {"num_shared_experts": 1, "first_k_dense_replace": 1},
        Routing("sigmoid", True, 2.5),
    ),
    "ling-2.5": FamilyCase(
        "bailing_hybrid", "BailingHybrid", _LOCAL | _LATENT | {"head_dim": 32, "n_group": 4, "topk_group": 2},
        Routing("sigmoid", True, 2.5, 4, 2),
    ),
    "kimi-linear": FamilyCase(
        "kimi_linear", "KimiLinear", _LOCAL | _LATENT | {"linear_head_dim": 32, "linear_num_heads": 2},
        Routing("sigmoid", True, 2.446),
    ),
    "mimo-v2-flash": FamilyCase(
        "mimo_v2_flash", "MiMoV2Flash",
        _ROUTED | {"n_shared_experts": ..., "v_head_dim": 32, "num_key_value_heads": 1},
        Routing("sigmoid"),
    ),
    "hunyuan-3": FamilyCase(
        "hy_v3", "HYV3", _NUMBERED | {"num_shared_experts": 2}, Routing("sigmoid", True, 2.826)
    ),
    "laguna": FamilyCase(
        "laguna", "Laguna",
        _NUMBERED | {"shared_expert_intermediate_size": INTERMEDIATE, "moe_routed_scaling_factor": 2.5},
        Routing("sigmoid", True, 2.5), scaled_after=2.5,
    ),
    "trinity": FamilyCase(
        "afmoe", "Afmoe", _NUMBERED | {"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 2.5},
        Routing("sigmoid", True, 2.5),
    ),
    "lfm2": FamilyCase(
        "lfm2_moe", "Lfm2Moe",
        _NUMBERED | {"num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention"]},
        Routing("sigmoid"),
    ),
    "lfm2-without-bias": FamilyCase(
        "lfm2_moe", "Lfm2Moe",
        _NUMBERED | {"num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention"],
                     "use_expert_bias": False},
        Routing("sigmoid"),
    ),
    "qwen3-vl": FamilyCase(
        "qwen3_vl_moe", "Qwen3VLMoeText", _NUMBERED, Routing("softmax"), class_name="Qwen3VLMoeTextModel"
    ),
    "qwen3-omni": FamilyCase(
        "qwen3_omni_moe", "Qwen3OmniMoeText", _NUMBERED, Routing("softmax"),
        class_name="Qwen3OmniMoeThinkerTextModel",
    ),
    "olmoe": FamilyCase("olmoe", "Olmoe", _WHOLE, Routing("softmax", False)),
    "flex-olmo": FamilyCase(
        "flex_olmo", "FlexOlmo", _WHOLE | {"norm_topk_prob": True}, Routing("softmax", True)
    ),
    "deepseek-v2-lite": FamilyCase(
        "deepseek_v2", "DeepseekV2", _ROUTED | _LATENT | {"n_shared_experts": 2}, Routing("softmax", False)
    ),
    "mistral-4": FamilyCase("mistral4", "Mistral4", _ROUTED | _LATENT, Routing("softmax")),
    "hunyuan-a13b": FamilyCase(
        "hunyuan_v1_moe", "HunYuanMoEV1", _WHOLE | {"moe_topk": TOP_K, "head_dim": 32}, Routing("softmax")
    ),
    "ernie-4.5": FamilyCase(
        "ernie4_5_moe", "Ernie4_5_Moe",
        _LAYERS | {"moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_num_shared_experts": 2, "head_dim": ...},
        Routing("softmax"),
    ),
    "jamba": FamilyCase(
        "jamba", "Jamba",
        _WHOLE | {"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2,
                  "attn_layer_offset": 0, "mamba_d_state": 8},
        Routing("softmax", False),
    ),
    "granite-3": FamilyCase(
        "granitemoe", "GraniteMoe",
        {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS}, Routing("softmax"),
    ),
    "qwen2": FamilyCase(
        "qwen2_moe", "Qwen2Moe", _NUMBERED | {"shared_expert_intermediate_size": 2 * INTERMEDIATE},
        Routing("softmax", False),
    ),
    "qwen3-next": FamilyCase(
        "qwen3_next", "Qwen3Next", _NUMBERED | _LINEAR | {"shared_expert_intermediate_size": INTERMEDIATE},
        Routing("softmax"),
    ),
    "qwen3.5": FamilyCase(
        "qwen3_5_moe", "Qwen3_5MoeText",
        _NUMBERED | _LINEAR | {"shared_expert_intermediate_size": INTERMEDIATE},
        Routing("softmax"), class_name="Qwen3_5MoeTextModel",
    ),
    "deepseek-v2": FamilyCase(
        "deepseek_v2", "DeepseekV2",
        _ROUTED | _LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                             "routed_scaling_factor": 16.0},
        Routing("softmax", False, 16.0, 4, 2, "best"),
    ),
    "glm-5-next": FamilyCase(
        "glm5_next", "Glm5NextText",
        _ROUTED | _INDEXED | {"linear_head_dim": 32, "linear_num_heads": 2, "index_kpool": 8,
                              "qk_rope_head_dim": 0, "swiglu_limit": 0.7,
                              "mlp_layer_types": ["dense", "sparse", "sparse"]},
        Routing("sigmoid", True, 2.5), class_name="Glm5NextTextModel",
    ),
    "hunyuan-4": FamilyCase(
        "hy_v4", "HYV4", _ROUTED | _INDEXED | {"swiglu_limit": 0.7}, Routing("sigmoid", True, 2.827),
        renames=((r"linear_gate\.", "gate_proj."),),
    ),
    "step-3.7": FamilyCase(
        "step3p7", "Step3p7Text",
        _ROUTED | {"n_shared_experts": ..., "num_local_experts": ..., "share_expert_dim": INTERMEDIATE,
                   "swiglu_limits": [0, 0.7, None], "swiglu_limits_shared": [0, 0, 0.4],
                   "mlp_layer_types": ["dense", "sparse", "sparse"], "moe_router_scaling_factor": 3.0,
                   "pad_token_id": ..., "sliding_window": 16},
        Routing("sigmoid", True, 3.0), class_name="Step3p7TextModel", scaled_after=3.0,
        renames=(
            (r"mlp\.gate\.e_score_correction_bias", "moe.router_bias"), (r"mlp\.gate\.", "moe.gate."),
            (r"mlp\.shared_experts\.", "share_expert."),
            (r"mlp\.experts\.(\w+?)(_scale_inv)?$", r"moe.\1.weight\2"),
        ),
    ),
    "minimax-m3": FamilyCase(
        "minimax_m3", "MiniMaxM3VLText",
        _LAYERS | {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS,
                   "dense_intermediate_size": 384, "shared_intermediate_size": INTERMEDIATE,
                   "swiglu_limit": 0.7, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        Routing("sigmoid", True, 2.0), class_name="MiniMaxM3VLTextModel", scaled_after=2.0,
        renames=(
            (r"mlp\.gate\.e_score", "block_sparse_moe.e_score"),
            (r"mlp\.(gate|experts|shared_experts)\.", r"block_sparse_moe.\1."),
        ),
    ),
    "deepseek-v4": FamilyCase(
        "deepseek_v4", "DeepseekV4",
        {"moe_intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS, "swiglu_limit": 0.7,
         "mlp_layer_types": ["hash_moe", "moe", "moe"]},
        Routing("sqrtsoftplus", True, 1.5),
    ),
    "phi-3.5-moe": FamilyCase(
        "phimoe", "Phimoe",
        {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        Routing("sparsemixer", False), top_k=2,
    ),
    "gpt-oss": FamilyCase(
        "gpt_oss", "GptOss",
        {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "head_dim": 32,
         "swiglu_limit": 0.7},
        Routing("softmax", bias_on="logits"),
    ),
    "llama-4": FamilyCase(
        "llama4", "Llama4Text",
        {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "head_dim": 32,
         "interleave_moe_layer_step": 1, "intermediate_size_mlp": 384},
        Routing("sigmoid", False), class_name="Llama4TextModel",
    ),
}  # fmt: skip

_MORE["mistral-small-4"] = replace(_MORE["mistral-4"], model_type="mistral3")
_MORE["step-3.5"] = replace(_MORE["step-3.7"], model_type="step3p5")
_MORE["minimax-m3-vl"] = replace(_MORE["minimax-m3"], model_type="minimax_m3_vl")

ALL_FAMILIES = FAMILIES | _MORE

EACH_FAMILY = few_of(ALL_FAMILIES, FAMILIES)
